"""The data sets that timm lists by name."""


class ImageFolder:
    pass


CIFAR10 = CIFAR100 = MNIST = KMNIST = FashionMNIST = ImageFolder
