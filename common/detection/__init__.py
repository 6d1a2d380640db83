"""What detection recipes share: images with boxes, detectors, and how well objects are found."""
