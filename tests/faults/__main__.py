from tests.faults.campaign import main

main()
