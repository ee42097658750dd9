"""What decoders that fill masks share: the canvas of a batch, forwards over it, its record, and steps that need no host."""
