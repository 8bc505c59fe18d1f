"""``python -m minfer``: see :mod:`minfer.cli`."""

from .cli.main import main

if __name__ == "__main__":
    main()
