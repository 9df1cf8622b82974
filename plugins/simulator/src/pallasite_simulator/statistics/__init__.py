"""What a launch did, in numbers: instructions, bytes, bank conflicts, and a roofline."""
