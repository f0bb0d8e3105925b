"""STAGE 3: `accelerate launch train.py +experiment=smollm2`. The loop is in train/loop.py."""

from train.loop import main

if __name__ == "__main__":
    main()
