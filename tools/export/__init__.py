"""Export: writes a trained model in the format of a runtime, and proves on the validation set that
it is the same model.
"""
