"""Software pipelines: sequential, warp-specialised, and loops that fetch their work."""
