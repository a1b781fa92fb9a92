"""`peers`: the same rounds in other libraries.

environments.py makes a virtual environment per library, measure.py compares. The scripts `run_*.py` run inside
those environments, where dfca is not installed; they and work.py do not import it.
"""
