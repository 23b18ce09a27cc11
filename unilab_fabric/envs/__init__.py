"""Tasks on numpy and MuJoCo; importing this package registers them with Gymnasium."""

from unilab_fabric.envs.registry import register_with_gymnasium

register_with_gymnasium()
