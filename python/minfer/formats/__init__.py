"""How weights and caches are stored: formats, packed layouts, interleaved gate and up rows, tables of rotations."""
