class Unpicklable: pass
