"""What pyproject.toml cannot say: an installed package holds what stands beside it here too, the configurations and
programs, as pangu/configs, pangu/tools and so on."""

from setuptools import find_packages, setup

BESIDE = {f"pangu.{folder.replace('/', '.')}": folder for folder in ("configs", "tools", "scripts")}

setup(py_modules=["pangu_train"], packages=[*find_packages(include=["pangu*"]), *BESIDE], package_dir=BESIDE)
