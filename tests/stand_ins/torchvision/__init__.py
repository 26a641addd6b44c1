"""A stand-in for torchvision: the names that timm imports to build its models, and nothing that works on images."""
