"""The catalog: devices, nodes and links from data sheets, a cluster from a few words, links fitted to measurements."""
