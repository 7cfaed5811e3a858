/* Faults in the calls that move messages, injected inside a process: preloaded, and armed by the process itself through `arm`.
 *
 * The call number `when` (counted from 1, over all calls named below) and, with `every`, each `every`-th one after it:
 *   KILL   the process dies by SIGKILL before the call is made; one that sends a command to Redis, after it
 *   FAIL   the call is not made, and reports `number`
 *   LOSE   the call is made, and reports `number` nevertheless (a network file system's lost reply)
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, KILL, FAIL, LOSE };
enum { MOVES = 1, SYNCS = 2, COMMANDS = 4, MARKS = 8 };

static int mode, number, every, kinds;
static long when;
static atomic_long calls;

void arm(int new_mode, int new_number, long new_when, int new_every, int new_kinds) {
    mode = new_mode, number = new_number, when = new_when, every = new_every, kinds = new_kinds;
    atomic_store(&calls, 0);
}

long counted(void) { return atomic_load(&calls); }

static int due(int kind) {
    if (mode == OFF || !(kinds & kind)) return 0;
    long call = atomic_fetch_add(&calls, 1) + 1;
    if (call != when && !(every && call > when && (call - when) % every == 0)) return 0;
    if (mode == KILL) {
        kill(getpid(), SIGKILL);
        pause();
    }
    return 1;
}

#define INJECT(kind, name, parameters, arguments)                 \
    int name parameters {                                         \
        static int(*real) parameters;                             \
        if (!real) real = dlsym(RTLD_NEXT, #name);                \
        if (!due(kind)) return real arguments;                    \
        if (mode == LOSE && real arguments != 0) return -1;       \
        errno = number;                                           \
        return -1;                                                \
    }

INJECT(MOVES, rename, (const char *a, const char *b), (a, b))
INJECT(MOVES, renameat, (int d, const char *a, int e, const char *b), (d, a, e, b))
INJECT(MOVES, renameat2, (int d, const char *a, int e, const char *b, unsigned f), (d, a, e, b, f))
INJECT(MOVES, link, (const char *a, const char *b), (a, b))
INJECT(MOVES, linkat, (int d, const char *a, int e, const char *b, int f), (d, a, e, b, f))
INJECT(MOVES, symlink, (const char *a, const char *b), (a, b))
INJECT(MOVES, symlinkat, (const char *a, int d, const char *b), (a, d, b))
INJECT(MOVES, unlink, (const char *a), (a))
INJECT(MOVES, unlinkat, (int d, const char *a, int f), (d, a, f))
INJECT(SYNCS, fsync, (int d), (d))
INJECT(SYNCS, fdatasync, (int d), (d))
INJECT(SYNCS, syncfs, (int d), (d))
INJECT(SYNCS, sync_file_range, (int d, off_t o, off_t n, unsigned f), (d, o, n, f))
INJECT(MARKS, mkdirat, (int d, const char *a, mode_t m), (d, a, m))
INJECT(MARKS, futimens, (int d, const struct timespec t[2]), (d, t))

/* What begins with an asterisk is a command of Redis. The server has it when the process dies. */
static ssize_t sent(ssize_t done, const void *data, size_t size) {
    if (done > 0 && size > 0 && *(const char *)data == '*') due(COMMANDS);
    return done;
}

ssize_t send(int d, const void *data, size_t size, int flags) {
    static ssize_t (*real)(int, const void *, size_t, int);
    if (!real) real = dlsym(RTLD_NEXT, "send");
    return sent(real(d, data, size, flags), data, size);
}

ssize_t sendmsg(int d, const struct msghdr *message, int flags) {
    static ssize_t (*real)(int, const struct msghdr *, int);
    if (!real) real = dlsym(RTLD_NEXT, "sendmsg");
    const struct iovec *first = message->msg_iov;
    return sent(real(d, message, flags), first ? first->iov_base : 0, message->msg_iovlen ? first->iov_len : 0);
}
