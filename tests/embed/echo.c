/*
 * Two tunnels in one process of an unprivileged user: one exchanges packets by function calls, one by a file descriptor that is set
 * later. Each sends ICMP echo requests to the server's address in the tunnel, and checks the replies.
 *
 * usage: echo CONFIGURATION ADDRESS OWN-ADDRESS
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "mpvpn.h"

enum { ECHO = 28 + 56, PATIENCE_S = 30 };

/* State set by the callbacks of a tunnel. */
struct seen {
    pthread_mutex_t lock;
    pthread_cond_t news;
    bool up;
    char address[64];
    unsigned sockets;
    unsigned lines;
    bool answered;
    uint16_t id;
};

static void fail(const char *format, ...) {
    va_list words;
    va_start(words, format);
    fputs("echo: ", stderr);
    vfprintf(stderr, format, words);
    fputc('\n', stderr);
    va_end(words);
    exit(1);
}

static void check(bool holds, const char *what) {
    if (!holds) fail("%s", what);
}

static uint16_t checksum(const uint8_t *bytes, size_t length) {
    uint32_t sum = 0;
    for (size_t at = 0; at + 1 < length; at += 2) sum += (uint32_t)bytes[at] << 8 | bytes[at + 1];
    if (length % 2 != 0) sum += (uint32_t)bytes[length - 1] << 8;
    while (sum >> 16 != 0) sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)~sum;
}

static void put16(uint8_t *at, uint16_t value) {
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

/* An echo request from one IPv4 address to another. */
static void make_request(uint8_t packet[ECHO], const char *from, const char *to, uint16_t id) {
    memset(packet, 0, ECHO);
    packet[0] = 0x45;
    put16(packet + 2, ECHO);
    packet[8] = 64;
    packet[9] = 1;
    check(inet_pton(AF_INET, from, packet + 12) == 1, "the tunnel has no IPv4 address");
    check(inet_pton(AF_INET, to, packet + 16) == 1, "ADDRESS is no IPv4 address");
    put16(packet + 10, checksum(packet, 20));
    packet[20] = 8;
    put16(packet + 24, id);
    put16(packet + 26, 1);
    put16(packet + 22, checksum(packet + 20, ECHO - 20));
}

static bool is_answer(const uint8_t *packet, size_t length, uint16_t id) {
    return length == ECHO && packet[0] == 0x45 && packet[9] == 1 && packet[20] == 0 && checksum(packet, 20) == 0 &&
           checksum(packet + 20, ECHO - 20) == 0 && packet[24] == id >> 8 && packet[25] == (id & 0xff);
}

static void on_packet(void *context, const uint8_t *data, size_t length) {
    struct seen *seen = context;
    pthread_mutex_lock(&seen->lock);
    seen->answered |= is_answer(data, length, seen->id);
    pthread_cond_signal(&seen->news);
    pthread_mutex_unlock(&seen->lock);
}

static void on_event(void *context, int kind, const char *json) {
    struct seen *seen = context;
    printf("event %d %s\n", kind, json);
    pthread_mutex_lock(&seen->lock);
    if (kind == MPVPN_UP) {
        const char *found = strstr(json, "\"addresses\":[\"");
        seen->up = found != NULL && sscanf(found + 14, "%63[0-9.]", seen->address) == 1;
    }
    pthread_cond_signal(&seen->news);
    pthread_mutex_unlock(&seen->lock);
}

static int on_protect(void *context, int fd, const char *link) {
    struct seen *seen = context;
    int kind = 0;
    socklen_t length = sizeof kind;
    bool is_udp = getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &length) == 0 && kind == SOCK_DGRAM;
    pthread_mutex_lock(&seen->lock);
    seen->sockets += is_udp && link[0] != '\0';
    pthread_mutex_unlock(&seen->lock);
    return 1;
}

static void on_log(void *context, int level, const char *target, const char *line) {
    struct seen *seen = context;
    pthread_mutex_lock(&seen->lock);
    seen->lines += level >= 1 && level <= 3 && target[0] != '\0' && line[0] != '\0';
    pthread_mutex_unlock(&seen->lock);
}

static void wait_for(struct seen *seen, const bool *what, const char *name) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += PATIENCE_S;
    pthread_mutex_lock(&seen->lock);
    while (!*what) {
        if (pthread_cond_timedwait(&seen->news, &seen->lock, &until) != 0) fail("not in time: %s", name);
    }
    pthread_mutex_unlock(&seen->lock);
}

static unsigned count(const char *folder) {
    unsigned entries = 0;
    DIR *dir = opendir(folder);
    check(dir != NULL, folder);
    while (readdir(dir) != NULL) entries++;
    closedir(dir);
    return entries;
}

/* Invalid arguments are refused with a reason. */
static void refuse_nonsense(const mpvpn_callbacks *callbacks) {
    char *error = NULL;
    mpvpn_config config = MPVPN_CONFIG_INIT;
    check(mpvpn_start(NULL, callbacks, NULL, NULL) == NULL, "NULL is a configuration");
    check(mpvpn_start(&config, callbacks, NULL, &error) == NULL && error != NULL, "no text is a configuration");
    mpvpn_string_free(error);
    config.toml = "server = '192.0.2.1'\nsever = 1\n";
    check(mpvpn_start(&config, callbacks, NULL, &error) == NULL, "a wrong key is taken");
    check(strstr(error, "line 2") != NULL && strstr(error, "sever") != NULL, error);
    mpvpn_string_free(error);
    config.toml = "server = '192.0.2.1'\ninsecure = true\n";
    config.packet_fd = 0;
    check(mpvpn_start(&config, callbacks, NULL, &error) == NULL && strstr(error, "both") != NULL, "two ways for packets");
    mpvpn_string_free(error);
    config.size = 4;
    check(mpvpn_start(&config, callbacks, NULL, NULL) == NULL, "a size of nothing is taken");
    check(mpvpn_push(NULL, (const uint8_t *)"", 1) == 0 && mpvpn_status_json(NULL) == NULL, "NULL is a tunnel");
    check(mpvpn_set_links(NULL, NULL, 0, NULL) == 0, "NULL has links");
    mpvpn_network_changed(NULL);
    mpvpn_stop(NULL);
    mpvpn_string_free(NULL);
}

static void start(mpvpn_tunnel **tunnel, struct seen *seen, const char *toml, bool by_calls, const mpvpn_link *links,
                  size_t link_count) {
    pthread_mutex_init(&seen->lock, NULL);
    pthread_cond_init(&seen->news, NULL);
    mpvpn_config config = MPVPN_CONFIG_INIT;
    config.toml = toml;
    config.log_level = 3;
    config.links = links;
    config.link_count = link_count;
    mpvpn_callbacks callbacks = MPVPN_CALLBACKS_INIT;
    callbacks.packet = by_calls ? on_packet : NULL;
    callbacks.event = on_event;
    callbacks.protect = on_protect;
    callbacks.log = on_log;
    char *error = NULL;
    *tunnel = mpvpn_start(&config, &callbacks, seen, &error);
    if (*tunnel == NULL) fail("it does not start: %s", error);
    mpvpn_network_changed(*tunnel);
}

static void finish(mpvpn_tunnel *tunnel, struct seen *seen, const char *second_link) {
    char *status = mpvpn_status_json(tunnel);
    check(status != NULL && strstr(status, "\"state\":\"up\"") != NULL, "the status is not up");
    check(strstr(status, second_link) != NULL, "a link is missing in the status");
    printf("status %s\n", status);
    mpvpn_string_free(status);
    mpvpn_stop(tunnel);
    check(seen->sockets >= 2, "the sockets of two links were not shown");
    check(seen->lines > 0, "there is no log");
}

int main(int count_of_words, char **words) {
    if (count_of_words != 4) fail("usage: echo CONFIGURATION ADDRESS OWN-ADDRESS");
    char toml[4096];
    FILE *file = fopen(words[1], "r");
    check(file != NULL, "no configuration");
    toml[fread(toml, 1, sizeof toml - 1, file)] = '\0';
    fclose(file);
    /* Some signals belong to the C library, which tells nothing about them. */
    struct sigaction before[NSIG] = {0}, after[NSIG] = {0};
    for (int number = 1; number < NSIG; number++) sigaction(number, NULL, &before[number]);

    mpvpn_callbacks callbacks = MPVPN_CALLBACKS_INIT;
    callbacks.packet = on_packet;
    refuse_nonsense(&callbacks);
    printf("version %s\n", mpvpn_version());
    unsigned descriptors = count("/proc/self/fd"), threads = count("/proc/self/task");

    int pair[2];
    check(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0, "no pair of sockets");
    struct seen by_calls = {.id = 0x1111}, by_descriptor = {.id = 0x2222};
    mpvpn_tunnel *one, *other;
    /* The first tunnel finds its links itself; the second gets one link by name and one by address. */
    const mpvpn_link links[] = {{"eth1", NULL, 0}, {"mobile", words[3], 1400}}, wrong[] = {{"eth1", "nowhere", 0}};
    start(&one, &by_calls, toml, true, NULL, 0);
    start(&other, &by_descriptor, toml, false, links, 2);
    wait_for(&by_calls, &by_calls.up, "the first tunnel");
    wait_for(&by_descriptor, &by_descriptor.up, "the second tunnel");
    /* As on Android, where the app creates the interface with the assigned addresses. */
    char *error = NULL;
    check(mpvpn_set_packet_fd(other, -1, &error) == 0 && error != NULL, "-1 is a descriptor");
    mpvpn_string_free(error);
    error = NULL;
    check(mpvpn_set_links(other, wrong, 1, &error) == 0 && strstr(error, "nowhere") != NULL, "a wrong address is taken");
    mpvpn_string_free(error);
    check(mpvpn_set_links(other, links, 2, NULL) == 1, "links are not taken");
    check(mpvpn_set_packet_fd(other, pair[1], NULL) == 1, "a descriptor is not taken");
    close(pair[1]);
    check(strcmp(by_calls.address, by_descriptor.address) != 0, "both tunnels have one address");

    uint8_t packet[ECHO], answer[2000];
    make_request(packet, by_calls.address, words[2], by_calls.id);
    check(mpvpn_push(one, packet, sizeof packet) == 1, "a packet is not taken");
    wait_for(&by_calls, &by_calls.answered, "an answer by call");
    make_request(packet, by_descriptor.address, words[2], by_descriptor.id);
    check(mpvpn_push(other, packet, sizeof packet) == 0, "a packet is taken beside the descriptor");
    check(send(pair[0], packet, sizeof packet, 0) == sizeof packet, "a packet is not taken by the descriptor");
    struct timeval patience = {.tv_sec = PATIENCE_S};
    setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ssize_t length;
    do {
        length = recv(pair[0], answer, sizeof answer, 0);
        check(length > 0, "no answer by the descriptor");
    } while (!is_answer(answer, (size_t)length, by_descriptor.id));

    finish(one, &by_calls, "\"eth2\"");
    finish(other, &by_descriptor, "\"mobile\"");
    check(recv(pair[0], answer, sizeof answer, 0) == 0, "the tunnel has kept its end of the pair");
    close(pair[0]);
    check(count("/proc/self/task") == threads, "threads are left");
    check(count("/proc/self/fd") == descriptors, "descriptors are left");
    for (int number = 1; number < NSIG; number++) {
        sigaction(number, NULL, &after[number]);
        check(before[number].sa_handler == after[number].sa_handler, "a signal was taken over");
    }
    puts("all is well");
    return 0;
}
