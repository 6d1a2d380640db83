"""From image files to batches on the device, for any task."""
