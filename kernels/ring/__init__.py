"""The ring: devices hand keys and values on, and attend to the ones that visit them.

            step 0            step 1            step 2            step 3
device 0    own K, V          K, V of 3         K, V of 2         K, V of 1
device 1    own K, V          K, V of 0         K, V of 3         K, V of 2
device 2    own K, V          K, V of 1         K, V of 0         K, V of 3
device 3    own K, V          K, V of 2         K, V of 1         K, V of 0
"""
