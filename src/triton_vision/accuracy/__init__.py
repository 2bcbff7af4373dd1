"""The served answers beside the PyTorch module's: what images show, what each side says, and how far apart they are."""
