// Attempts of somebody who has taken over a process of mpvpn: loaded into it (LD_PRELOAD), made at SIGUSR2. Each writes a
// line with its name and 0, or with the error number of the kernel.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/tiocl.h>
#include <pty.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

static int report = -1, terminal = -1, null = -1;
static pid_t outside;
static char victims[4096], folders[8192];

#define TRY(name, call) (errno = 0, record(name, (call) < 0 ? errno : 0))

static void record(const char *name, int error) { dprintf(report, "%s: %d\n", name, error); }

static const char *victim(const char *name) {
    static char path[8192];
    snprintf(path, sizeof path, "%s/%s", victims, name);
    return path;
}

// The file has no name and is gone with its process.
static int make_in(const char *folder) { return open(folder, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600); }

// Reads the list of each folder, and makes a file there.
static void try_folders(void) {
    char name[sizeof folders + 16];
    for (char *path = folders; *path; path += strlen(path) + 1) {
        snprintf(name, sizeof name, "read in %s", path);
        TRY(name, open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        snprintf(name, sizeof name, "change in %s", path);
        TRY(name, make_in(path));
    }
}

static int read_of(const char *path) { return open(path, O_RDONLY | O_NOCTTY); }

static int connect_to(const char *path, int abstract) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path + abstract, path, sizeof address.sun_path - 2);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0) return fd;
    return connect(fd, (struct sockaddr *)&address, offsetof(struct sockaddr_un, sun_path) + abstract + strlen(path));
}

static long start_process(void) {
    long child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) _exit(0);
    return child;
}

static void attempt(int signal) {
    (void)signal;
    int kept = errno;
    // The lines about refused calls are not for the log.
    int standard_error = dup(2);
    dup2(null, 2);
    TRY("make a file in /etc", make_in("/etc"));
    TRY("make a file in /etc/cron.d", make_in("/etc/cron.d"));
    TRY("make a file outside of its folders", make_in(victim("open")));
    TRY("change the mode of a file of root", chmod(victim("secret"), 0666));
    TRY("change the owner of a file of root", chown(victim("secret"), 1, 1));
    TRY("remove a file of root", unlink(victim("root/removed")));
    TRY("read /etc/shadow", read_of("/etc/shadow"));
    TRY("read /etc/gshadow", read_of("/etc/gshadow"));
    TRY("read the state of another instance", read_of(victim("secret")));
    TRY("read the memory of another process", read_of(victim("memory")));
    TRY("make a UNIX socket", socket(AF_UNIX, SOCK_STREAM, 0));
    TRY("make a UNIX datagram socket", socket(AF_UNIX, SOCK_DGRAM, 0));
    int pair[2];
    TRY("make a pair of UNIX datagram sockets", socketpair(AF_UNIX, SOCK_DGRAM, 0, pair));
    TRY("connect to a UNIX socket", connect_to(victim("open/socket"), 0));
    TRY("connect to an abstract UNIX socket", connect_to(victims, 1));
    TRY("TIOCSTI", ioctl(terminal, TIOCSTI, "x"));
    char subcode = TIOCL_GETSHIFTSTATE;
    TRY("TIOCLINUX", ioctl(terminal, TIOCLINUX, &subcode));
    TRY("TIOCSETD", ioctl(terminal, TIOCSETD, &(int){0}));
    TRY("signal another process", kill(outside, 0));
    TRY("ptrace", ptrace(PTRACE_SEIZE, outside, 0, 0));
    TRY("userfaultfd", syscall(SYS_userfaultfd, O_CLOEXEC));
    TRY("io_uring_setup", syscall(SYS_io_uring_setup, 1, (char[256]){0}));
    TRY("bpf", syscall(SYS_bpf, 0, (char[256]){0}, 72));
    TRY("perf_event_open", syscall(SYS_perf_event_open, (char[256]){0}, 0, -1, -1, 0));
    TRY("add_key", syscall(SYS_add_key, "user", "x", "x", 1, -3));
    TRY("unshare", unshare(CLONE_NEWUSER | CLONE_NEWNS));
    TRY("setns", setns(read_of("/proc/self/ns/mnt"), 0));
    TRY("mount", syscall(SYS_mount, "none", "/tmp", "tmpfs", 0, 0));
    TRY("chroot", chroot("/tmp"));
    TRY("setuid", syscall(SYS_setresuid, 0, 0, 0));
    TRY("packet socket", socket(AF_PACKET, SOCK_RAW, 0));
    TRY("raw socket", socket(AF_INET, SOCK_RAW, 1));
    TRY("vsock", socket(AF_VSOCK, SOCK_STREAM, 0));
    try_folders();
    TRY("change in /proc/sys/net", open("/proc/sys/net/ipv4/ip_forward", O_WRONLY | O_CLOEXEC));
    TRY("start a process", start_process());
    TRY("run a program", execl("/nonexistent", "x", (char *)0));
    dup2(standard_error, 2);
    close(standard_error);
    dprintf(report, "end\n");
    errno = kept;
}

__attribute__((constructor)) static void prepare(void) {
    const char *folder = getenv("MPVPN_BREAKOUT"), *other = getenv("MPVPN_BREAKOUT_OUTSIDE");
    if (!folder || !other) return;
    char path[4200];
    snprintf(victims, sizeof victims, "%s", folder);
    snprintf(path, sizeof path, "%s/%d", victims, getpid());
    report = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    outside = atoi(other);
    const char *list = getenv("MPVPN_BREAKOUT_FOLDERS");
    snprintf(folders, sizeof folders - 1, "%s", list ? list : "");
    for (char *end = folders; (end = strchr(end, ':')); ++end) *end = 0;
    // A terminal of its own, as `sudo` has one.
    int master, slave;
    null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    if (report < 0 || openpty(&master, &slave, 0, 0, 0) < 0) return;
    setsid();
    ioctl(slave, TIOCSCTTY, 0);
    terminal = slave;
    signal(SIGUSR2, attempt);
}
