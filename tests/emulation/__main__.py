"""Build the libraries below a folder and print where: ``python -m tests.emulation FOLDER``.

The folder that is printed is laid out like a ROCm installation, so ``ROCM_PATH=`` it makes ``pip install hipfile`` find
the header and the library, and hip-python the runtime.
"""

import sys
from pathlib import Path

from tests.emulation.build import build

if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
