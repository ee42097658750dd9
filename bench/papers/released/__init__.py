"""What the authors' released code does where it differs from ours: its loops, its losses and its faults, to compare with, not to use.

`planned` and `slowfast` hold methods for `pdkernels.decoding.generate`, made of parts of our decoders; `planned_training` makes a batch.
The `plain_` modules write that code out in plain PyTorch: tests compare the others with them, and our own methods with the rest.
"""
