"""COCO's numbers, matches and pictures of an evaluation."""
