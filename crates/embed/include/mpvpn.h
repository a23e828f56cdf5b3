/*
 * mpvpn inside an app: a multipath MASQUE VPN client whose packets the app has.
 *
 * Link with libmpvpn.so. It needs no privilege, changes nothing on the machine, takes no signal, prints nothing and never
 * ends the process. A process may have several tunnels. Every function may be called by any thread, and refuses NULL where
 * it is not said to be allowed. docs/guide/inside-an-app.md tells how to use it.
 *
 * Strings are UTF-8 and end with NUL. What is given to a function is read before it returns and stays the caller's. What a
 * callback gets is valid until the callback returns. What a function returns as `char *` is to be given to
 * mpvpn_string_free.
 */
#ifndef MPVPN_H
#define MPVPN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A running tunnel. */
typedef struct mpvpn_tunnel mpvpn_tunnel;

/* An uplink that the app knows. */
typedef struct mpvpn_link {
    /* The name of its interface, or any other that tells it from the rest. */
    const char *name;
    /* The address of this machine to send from, as text; NULL: any. */
    const char *address;
    /* The largest IP packet that it carries, in bytes; 0: 1500. */
    uint32_t mtu;
} mpvpn_link;

/* What a tunnel is to do. Begin with MPVPN_CONFIG_INIT. */
typedef struct mpvpn_config {
    /* sizeof(mpvpn_config). */
    size_t size;
    /* TOML with the keys of client.toml, but those about a TUN device, proxies and the log. */
    const char *toml;
    /*
     * A descriptor that carries one IP packet a read and a write: what Android's VpnService gives, or an end of a pair of
     * SOCK_SEQPACKET or SOCK_DGRAM sockets. It is duplicated, so the caller closes it whenever it likes; it becomes
     * nonblocking. -1: packets come by mpvpn_push and go by the callback `packet`; or, if that is NULL, mpvpn_set_packet_fd
     * brings a descriptor later, as VpnService makes one of the addresses that MPVPN_UP tells.
     */
    int packet_fd;
    /* The uplinks, link_count of them. NULL: the kernel tells them; Android lets no app ask. */
    const mpvpn_link *links;
    size_t link_count;
    /* What the callback `log` gets: 1 errors, 2 warnings, 3 changes, 4 events, 5 packets, too; 0 nothing. */
    int log_level;
} mpvpn_config;

#define MPVPN_CONFIG_INIT { sizeof(mpvpn_config), NULL, -1, NULL, 0, 0 }

/* What happened. */
enum {
    /* The connection is lost; another is made by itself. JSON: {"reason":"…"}. */
    MPVPN_DOWN = 0,
    /*
     * The tunnel works, or has got other addresses, routes or another MTU. JSON:
     * {"addresses":["10.0.0.2/32"],"routes":["0.0.0.0/0"],"mtu":1400}.
     */
    MPVPN_UP = 1,
    /* The tunnel has ended by itself and has to be stopped. JSON: {"reason":"…"}. */
    MPVPN_FAILED = 2
};

/*
 * What the tunnel calls. All but `resolve` are called by the tunnel's own thread, one after the other, and must not wait.
 * In them mpvpn_push, mpvpn_set_packet_fd, mpvpn_network_changed and mpvpn_set_links may be called; mpvpn_status_json
 * gives NULL, and mpvpn_stop returns at once, so that the tunnel ends after the callback. Any may be NULL.
 */
typedef struct mpvpn_callbacks {
    /* sizeof(mpvpn_callbacks). */
    size_t size;
    /* One IP packet for the app, whole, with right checksums. NULL where there is, or will be, a descriptor. */
    void (*packet)(void *context, const uint8_t *data, size_t length);
    /* Something happened; `kind` is one of those above. */
    void (*event)(void *context, int kind, const char *json);
    /*
     * A socket of this link is about to be used. Keep it out of the tunnel (VpnService.protect), and bind it to the link's
     * network if need be (android_setsocknetwork). Nonzero lets it be used; else the link is not. The tunnel closes it.
     */
    int (*protect)(void *context, int fd, const char *link);
    /*
     * Puts the addresses of a host into `addresses`, with spaces between them and NUL at the end, in at most `room` bytes;
     * nonzero if there are any. Called by a thread of its own, and may wait; mpvpn_stop waits for it. NULL: the system's
     * resolver, which may ask through this very tunnel.
     */
    int (*resolve)(void *context, const char *host, char *addresses, size_t room);
    /* A line of the log; `level` as in mpvpn_config.log_level. */
    void (*log)(void *context, int level, const char *target, const char *line);
} mpvpn_callbacks;

#define MPVPN_CALLBACKS_INIT { sizeof(mpvpn_callbacks), NULL, NULL, NULL, NULL, NULL }

/*
 * Starts a tunnel; it connects by itself, and the event MPVPN_UP tells when it has. `context` is handed to all callbacks,
 * and has to be there, and usable by another thread, until mpvpn_stop has returned. NULL if it cannot start: then *error,
 * if `error` is not NULL, says why, and is to be freed. To be given to mpvpn_stop exactly once.
 */
mpvpn_tunnel *mpvpn_start(const mpvpn_config *config, const mpvpn_callbacks *callbacks, void *context, char **error);

/*
 * Hands over one IP packet of the app, without waiting. 1 if it was taken, 0 if not: too many wait, the tunnel has ended,
 * or packets come by a descriptor. While there is no connection packets are taken and lost.
 */
int mpvpn_push(mpvpn_tunnel *tunnel, const uint8_t *data, size_t length);

/*
 * Packets come and go by this descriptor from now on, whatever they did before; see mpvpn_config.packet_fd. The library's
 * duplicate of the one before is closed. 1 if it can carry packets; else 0, nothing changes, and *error says why as with
 * mpvpn_start.
 */
int mpvpn_set_packet_fd(mpvpn_tunnel *tunnel, int packet_fd, char **error);

/* Links may have come or gone: they are looked at anew. Where the app gave them it is mpvpn_set_links. */
void mpvpn_network_changed(mpvpn_tunnel *tunnel);

/*
 * The links are these now, whoever told before; one that is here again with the same address keeps its socket. `links` may
 * be NULL if `count` is 0. 1 if they are understood; else 0, nothing changes, and *error says why as with mpvpn_start.
 */
int mpvpn_set_links(mpvpn_tunnel *tunnel, const mpvpn_link *links, size_t count, char **error);

/* How things are, in JSON as of `mpvpn status --json`, to be freed. NULL if the tunnel has ended, or in a callback. */
char *mpvpn_status_json(mpvpn_tunnel *tunnel);

/*
 * Says good-bye to the server, waits until the tunnel's threads have ended, and frees the tunnel: no callback is called
 * after this. NULL is allowed.
 */
void mpvpn_stop(mpvpn_tunnel *tunnel);

/* Frees a string that this library returned. NULL is allowed. */
void mpvpn_string_free(char *string);

/* The version of the library, as "0.1.0"; not to be freed. */
const char *mpvpn_version(void);

#ifdef __cplusplus
}
#endif

#endif
