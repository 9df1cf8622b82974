"""What kernels write: references to other devices, signals to them, multicast."""
