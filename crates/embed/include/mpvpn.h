/*
 * mpvpn inside an app: a multipath MASQUE VPN client that exchanges IP packets with the app instead of a TUN device.
 *
 * Link with libmpvpn.so. It needs no privilege, changes nothing on the machine, takes no signal, prints nothing and never
 * ends the process. A process may have several tunnels. Every function may be called by any thread, and refuses NULL unless
 * its comment allows it. docs/guide/inside-an-app.md shows how to use it.
 *
 * Strings are UTF-8 and end with NUL. Arguments of a function are read before it returns and stay the caller's. Arguments of
 * a callback are valid until the callback returns. A `char *` that a function returns has to be freed by
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
    /* The name of its interface, or any other unique name. */
    const char *name;
    /* The address of this machine to send from, as text; NULL: any. */
    const char *address;
    /* The largest IP packet that it carries, in bytes; 0: 1500. */
    uint32_t mtu;
} mpvpn_link;

/* The configuration of a tunnel. Initialize it with MPVPN_CONFIG_INIT. */
typedef struct mpvpn_config {
    /* sizeof(mpvpn_config). */
    size_t size;
    /* TOML with the keys of client.toml, except those about a TUN device, proxies and the log. */
    const char *toml;
    /*
     * A descriptor that carries one IP packet per read and write: the one of Android's VpnService, or one end of a pair of
     * SOCK_SEQPACKET or SOCK_DGRAM sockets. It is duplicated, so the caller may close it at any time; it becomes
     * nonblocking. -1: the app sends packets by mpvpn_push and receives them by the callback `packet`; or, if that is NULL,
     * mpvpn_set_packet_fd gives a descriptor later, as VpnService creates one from the addresses of MPVPN_UP.
     */
    int packet_fd;
    /* The uplinks, link_count of them. NULL: the kernel lists them, which Android does not allow apps. */
    const mpvpn_link *links;
    size_t link_count;
    /* The most detailed level for the callback `log`: 0 nothing, 1 errors, 2 warnings, 3 changes of state, 4 events, 5 packets. */
    int log_level;
} mpvpn_config;

#define MPVPN_CONFIG_INIT { sizeof(mpvpn_config), NULL, -1, NULL, 0, 0 }

/* The kinds of events. */
enum {
    /* The connection is lost; the tunnel reconnects by itself. JSON: {"reason":"…"}. */
    MPVPN_DOWN = 0,
    /*
     * The tunnel works, or has got other addresses, routes or another MTU. JSON:
     * {"addresses":["10.0.0.2/32"],"routes":["0.0.0.0/0"],"mtu":1400}.
     */
    MPVPN_UP = 1,
    /* The tunnel has ended because of an error; call mpvpn_stop. JSON: {"reason":"…"}. */
    MPVPN_FAILED = 2
};

/*
 * The callbacks. All but `resolve` are called by the tunnel's own thread, one after the other, and must not block.
 * In them mpvpn_push, mpvpn_set_packet_fd, mpvpn_network_changed and mpvpn_set_links may be called; mpvpn_status_json
 * gives NULL, and mpvpn_stop returns at once, so that the tunnel ends after the callback. Any may be NULL.
 */
typedef struct mpvpn_callbacks {
    /* sizeof(mpvpn_callbacks). */
    size_t size;
    /* One whole IP packet for the app, with valid checksums. NULL if a descriptor is used. */
    void (*packet)(void *context, const uint8_t *data, size_t length);
    /* An event; `kind` is one of those above, `json` has its fields. */
    void (*event)(void *context, int kind, const char *json);
    /*
     * Called before a socket of this link is used. Exclude it from the tunnel (VpnService.protect), and bind it to the link's
     * network if necessary (android_setsocknetwork). Return nonzero to allow it; with 0 the link is not used. The tunnel
     * closes the socket.
     */
    int (*protect)(void *context, int fd, const char *link);
    /*
     * Resolves a host: writes its addresses to `addresses`, separated by spaces and ended by NUL, in at most `room` bytes, and
     * returns nonzero if there are any. Called by a thread of its own, and may block; mpvpn_stop waits for it. NULL: the
     * system's resolver is used, whose queries may go through this very tunnel.
     */
    int (*resolve)(void *context, const char *host, char *addresses, size_t room);
    /* A line of the log; `level` as in mpvpn_config.log_level. */
    void (*log)(void *context, int level, const char *target, const char *line);
} mpvpn_callbacks;

#define MPVPN_CALLBACKS_INIT { sizeof(mpvpn_callbacks), NULL, NULL, NULL, NULL, NULL }

/*
 * Starts a tunnel. It connects in the background, and reports MPVPN_UP when it is connected. `context` is passed to all
 * callbacks; it has to be valid, and usable by other threads, until mpvpn_stop has returned. Returns NULL if the tunnel
 * cannot start: then *error, if `error` is not NULL, is the reason and has to be freed. Call mpvpn_stop exactly once for
 * each tunnel.
 */
mpvpn_tunnel *mpvpn_start(const mpvpn_config *config, const mpvpn_callbacks *callbacks, void *context, char **error);

/*
 * Sends one IP packet of the app into the tunnel, without blocking. Returns 1 if it was accepted; 0 if the queue is full
 * (1024 packets), the tunnel has ended, or packets come by a descriptor. Without a connection, packets are accepted and lost.
 */
int mpvpn_push(mpvpn_tunnel *tunnel, const uint8_t *data, size_t length);

/*
 * Uses this descriptor for packets from now on, instead of calls or an earlier descriptor; see mpvpn_config.packet_fd. The
 * library closes its duplicate of the earlier one. Returns 1 if the descriptor can carry packets; else 0, nothing changes,
 * and *error is the reason, as with mpvpn_start.
 */
int mpvpn_set_packet_fd(mpvpn_tunnel *tunnel, int packet_fd, char **error);

/* Reads the links from the kernel again. An app that gives the links itself calls mpvpn_set_links instead. */
void mpvpn_network_changed(mpvpn_tunnel *tunnel);

/*
 * Replaces the list of links. A link that stays with the same address keeps its socket. `links` may be NULL if `count` is 0.
 * Returns 1 if the links are valid; else 0, nothing changes, and *error is the reason, as with mpvpn_start.
 */
int mpvpn_set_links(mpvpn_tunnel *tunnel, const mpvpn_link *links, size_t count, char **error);

/* The status, in the JSON of `mpvpn status --json`, to be freed. NULL if the tunnel has ended, or in a callback. */
char *mpvpn_status_json(mpvpn_tunnel *tunnel);

/*
 * Closes the connection, waits until the tunnel's threads have ended, and frees the tunnel: no callback is called after
 * this. NULL is allowed.
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
