"""minfer as a kernel of the Hugging Face kernels hub: layers for ``kernelize``, and the script that packages them."""
