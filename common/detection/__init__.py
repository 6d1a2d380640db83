"""What only object detection needs."""
