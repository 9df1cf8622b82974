"""What views of the memory of other devices mean."""
