"""Helpers of the tests, in one package: nothing that tests here, nothing that the product imports.

pytest finds it by ``pythonpath`` in pyproject.toml; a program that runs alone by PYTHONPATH=tests.
``plugins`` holds SGLang plugins for servers under test, each in a folder for PYTHONPATH.
"""
