"""The four views: what each asks for and shows. What they compute is in the modules beside this folder."""
