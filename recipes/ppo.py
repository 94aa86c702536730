"""PPO from a YAML file, on one process or on several: the same as `trl-ppo train`.

accelerate launch --config_file recipes/accelerate/ddp.yaml recipes/ppo.py --config
recipes/templates/chat_multi_gpu/ppo.yaml
"""

import sys

from trl_ppo_ext.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
