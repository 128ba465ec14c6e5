"""The choice by price of what is elsewhere or computed again: `--offload auto`."""
