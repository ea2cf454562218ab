"""Bad inputs and damaged files, tried on the whole of matlens: what is refused in words, and what is not."""
