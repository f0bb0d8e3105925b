"""`eagle31 train`: stage 3 as train.py runs it, which an installed wheel does not have."""

from train.loop import main

if __name__ == "__main__":
    main()
