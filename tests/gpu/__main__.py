from tests.gpu.report import main

main()
