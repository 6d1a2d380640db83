"""Predict: what a trained model sees in images, as JSONL, CSV or COCO's results, and as pictures."""
