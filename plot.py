def plot(runs, out):
    pass
