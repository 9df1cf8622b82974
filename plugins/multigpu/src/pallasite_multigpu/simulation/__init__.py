"""What the simulator needs to run kernels of several devices."""
