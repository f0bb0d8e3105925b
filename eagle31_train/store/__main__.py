"""`eagle31 store`: see `verify.py`."""

import sys

from eagle31_train.store.verify import main

if __name__ == "__main__":
    sys.exit(main())
