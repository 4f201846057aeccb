"""The four views: their inputs and outputs. What they compute is in the modules beside this folder."""
