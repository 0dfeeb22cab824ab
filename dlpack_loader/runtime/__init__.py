"""What the machine offers below the backends: memory, files, and later devices. One file each."""
