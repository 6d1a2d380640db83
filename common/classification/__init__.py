"""What only image classification needs."""
