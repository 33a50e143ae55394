"""The Llama family on CUDA: nine kernels a layer, recorded as graphs by rows alone, tokens chosen on the device."""
