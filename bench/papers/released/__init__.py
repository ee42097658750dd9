"""What the authors' released code does where it differs from our decoders: its loops and its faults, for comparison, not for use.

`planned` and `slowfast` hold methods for `pdkernels.decoding.generate`, made of our decoders' parts. The others are plain PyTorch:
`plain_planned` and `plain_slowfast` are what those two are tested with; `plain_recurrent` and `plain_multiblock` follow code that is
only compared with.
"""
