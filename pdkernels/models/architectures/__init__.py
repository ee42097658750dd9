"""Models: transformers, hybrids and recurrent depth, from layers to whole forwards."""
