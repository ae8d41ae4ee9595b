/* The first process of a pod, and of a node's pid namespace: it ends on SIGTERM and reaps orphaned processes. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void end(int number) {
    (void)number;
    _exit(0);
}

static void reap(int number) {
    (void)number;
    while (waitpid(-1, 0, WNOHANG) > 0)
        ;
}

int main(void) {
    struct sigaction ending = {.sa_handler = end}, reaping = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGINT, &ending, 0);
    sigaction(SIGTERM, &ending, 0);
    sigaction(SIGCHLD, &reaping, 0);
    for (;;)
        pause();
}
