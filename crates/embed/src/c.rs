//! The C functions of `include/mpvpn.h`, whose comments define behaviour, ownership and threads.
//!
//! In: pointers, C strings and descriptors. Out: calls of [`Tunnel`]. Always holds: no panic crosses the
//! border to C.

#![allow(non_camel_case_types, reason = "these are the names of the header")]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    net::IpAddr,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
};

use mpvpn_client::embedded::Packets;
use serde_json::json;

use crate::{Builder, Error, Event, Level, Link, Tunnel};

/// Buffer for the addresses that an app resolves (bytes): about 25 IPv6 addresses. Smaller: long lists are
/// cut; larger: no use, because a client tries few addresses.
const ADDRESS_BUFFER_BYTES: usize = 1024;

/// A running tunnel.
pub struct mpvpn_tunnel(Tunnel);

/// An uplink that the app knows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mpvpn_link {
    /// The name of its interface, or another unique name.
    pub name: *const c_char,
    /// The address to send from; may be null.
    pub address: *const c_char,
    /// The largest IP packet (bytes); 0: 1500.
    pub mtu: u32,
}

/// The configuration of a tunnel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mpvpn_config {
    /// The size of this struct in bytes.
    pub size: usize,
    /// The configuration as TOML.
    pub toml: *const c_char,
    /// The descriptor for packets, or -1.
    pub packet_fd: c_int,
    /// The uplinks; null: those that the kernel reports.
    pub links: *const mpvpn_link,
    /// The number of uplinks.
    pub link_count: usize,
    /// 0 (no lines) to 5 (TRACE).
    pub log_level: c_int,
}

/// The callbacks of a tunnel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mpvpn_callbacks {
    /// The size of this struct in bytes.
    pub size: usize,
    /// A packet for the app.
    pub packet: Option<unsafe extern "C" fn(*mut c_void, *const u8, usize)>,
    /// An event.
    pub event: Option<unsafe extern "C" fn(*mut c_void, c_int, *const c_char)>,
    /// A new socket, before its first use.
    pub protect: Option<unsafe extern "C" fn(*mut c_void, c_int, *const c_char) -> c_int>,
    /// Resolves a name.
    pub resolve: Option<unsafe extern "C" fn(*mut c_void, *const c_char, *mut c_char, usize) -> c_int>,
    /// A log line.
    pub log: Option<unsafe extern "C" fn(*mut c_void, c_int, *const c_char, *const c_char)>,
}

/// The `context` pointer of the app, which all its callbacks get.
#[derive(Clone, Copy)]
struct Context(*mut c_void);

// SAFETY: the header demands of the app that other threads can use what it points to.
unsafe impl Send for Context {}
// SAFETY: as above; this library never dereferences the pointer.
unsafe impl Sync for Context {}

impl Context {
    /// A method, so that closures capture the whole value.
    fn pointer(self) -> *mut c_void {
        self.0
    }
}

/// Starts a tunnel.
///
/// # Safety
/// As the header demands: pointers are null or valid, strings end with NUL, `context` can be used by other
/// threads until the tunnel has stopped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mpvpn_start(
    config: *const mpvpn_config,
    callbacks: *const mpvpn_callbacks,
    context: *mut c_void,
    error: *mut *mut c_char,
) -> *mut mpvpn_tunnel {
    let started = catch_panic(Err("a panic".to_owned()), || {
        // SAFETY: null or valid, by the contract of this function.
        let (config, callbacks) = unsafe { (config.as_ref(), callbacks.as_ref()) };
        let config = config.ok_or("config is NULL")?;
        let callbacks = callbacks.ok_or("callbacks is NULL")?;
        if config.size != size_of::<mpvpn_config>() || callbacks.size != size_of::<mpvpn_callbacks>() {
            return Err("a size is not that of this version: begin with MPVPN_CONFIG_INIT and \
                        MPVPN_CALLBACKS_INIT of its header"
                .to_owned());
        }
        // SAFETY: what they point to is valid, by the contract of this function.
        unsafe { start(config, callbacks, Context(context)) }
    });
    match started {
        Ok(tunnel) => Box::into_raw(Box::new(mpvpn_tunnel(tunnel))),
        Err(reason) => {
            // SAFETY: null or valid, by the contract of this function.
            unsafe { set_error(error, reason) };
            ptr::null_mut()
        }
    }
}

/// # Safety
/// All pointers among the arguments are valid.
unsafe fn start(
    config: &mpvpn_config,
    callbacks: &mpvpn_callbacks,
    context: Context,
) -> Result<Tunnel, String> {
    // SAFETY: valid, by the contract.
    let toml = unsafe { text(config.toml, "toml") }?;
    let mut builder = Builder::new(toml).map_err(error_text)?;
    if !config.links.is_null() {
        // SAFETY: valid, by the contract.
        builder = builder.links(unsafe { links(config.links, config.link_count) }?);
    }
    if let Some(protect) = callbacks.protect {
        builder = builder.protect(move |socket, link| {
            let link = c_string(link);
            // SAFETY: the app's function, with the context that it gave; the string and the socket outlive
            // the call.
            unsafe { protect(context.pointer(), socket.as_raw_fd(), link.as_ptr()) != 0 }
        });
    }
    if let Some(resolve) = callbacks.resolve {
        builder = builder.resolve(move |host| {
            let mut found = [0_u8; ADDRESS_BUFFER_BYTES];
            let (host, room) = (c_string(host), found.len() - 1);
            // SAFETY: the app's function, with the context that it gave; strings and room outlive the call.
            if unsafe { resolve(context.pointer(), host.as_ptr(), found.as_mut_ptr().cast(), room) } == 0 {
                return Err("the app found no address".to_owned());
            }
            addresses(&found)
        });
    }
    if let (Some(log), Some(max_level)) = (callbacks.log, level(config.log_level)) {
        builder = builder.log(max_level, move |level, target, line| {
            let (target, line) = (c_string(target), c_string(line));
            // SAFETY: the app's function, with the context that it gave; the strings outlive the call.
            unsafe { log(context.pointer(), number(level), target.as_ptr(), line.as_ptr()) };
        });
    }
    let packets = match (callbacks.packet, config.packet_fd) {
        (Some(packet), -1) => Packets::Calls(Box::new(move |data| {
            // SAFETY: the app's function, with the context that it gave; the packet outlives the call.
            unsafe { packet(context.pointer(), data.as_ptr(), data.len()) };
        })),
        (None, fd) if fd >= 0 => Packets::Descriptor(duplicate(fd)?),
        (Some(_), _) => return Err("both a callback `packet` and a packet_fd are given".to_owned()),
        (None, _) => Packets::Later,
    };
    let call = callbacks.event;
    let events = move |event| {
        let Some(call) = call else { return };
        let (kind, json) = encode_event(&event);
        // SAFETY: the app's function, with the context that it gave; the string outlives the call.
        unsafe { call(context.pointer(), kind, json.as_ptr()) };
    };
    builder.start_with(packets, Box::new(events)).map_err(error_text)
}

/// Sends a packet of the app.
///
/// # Safety
/// `tunnel` is null or of [`mpvpn_start`] and not stopped; `data` is null or has `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mpvpn_push(tunnel: *mut mpvpn_tunnel, data: *const u8, length: usize) -> c_int {
    catch_panic(0, || {
        // SAFETY: null or valid, by the contract of this function.
        let Some(tunnel) = (unsafe { tunnel.as_ref() }) else { return 0 };
        if data.is_null() || length > isize::MAX as usize {
            return 0;
        }
        // SAFETY: not null, and so many bytes, by the contract of this function.
        tunnel.0.push(unsafe { std::slice::from_raw_parts(data, length) }).into()
    })
}

/// Sets another descriptor for packets.
///
/// # Safety
/// `tunnel` is null or of [`mpvpn_start`] and not stopped; `error` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mpvpn_set_packet_fd(
    tunnel: *mut mpvpn_tunnel,
    packet_fd: c_int,
    error: *mut *mut c_char,
) -> c_int {
    let set = catch_panic(Err("a panic".to_owned()), || {
        // SAFETY: null or valid, by the contract of this function.
        let tunnel = unsafe { tunnel.as_ref() }.ok_or("tunnel is NULL")?;
        tunnel.0.set_descriptor(duplicate(packet_fd)?).map_err(error_text)
    });
    // SAFETY: null or valid, by the contract of this function.
    unsafe { return_code(set, error) }
}

/// Reads the links from the kernel again.
///
/// # Safety
/// `tunnel` is null or of [`mpvpn_start`] and not stopped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mpvpn_network_changed(tunnel: *mut mpvpn_tunnel) {
    catch_panic((), || {
        // SAFETY: null or valid, by the contract of this function.
        if let Some(tunnel) = unsafe { tunnel.as_ref() } {
            tunnel.0.network_changed();
        }
    });
}

/// Replaces the list of links.
///
/// # Safety
/// `tunnel` is null or of [`mpvpn_start`] and not stopped; `given` is null or has `count` links; `error` is
/// null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mpvpn_set_links(
    tunnel: *mut mpvpn_tunnel,
    given: *const mpvpn_link,
    count: usize,
    error: *mut *mut c_char,
) -> c_int {
    let set = catch_panic(Err("a panic".to_owned()), || {
        // SAFETY: null or valid, by the contract of this function.
        let tunnel = unsafe { tunnel.as_ref() }.ok_or("tunnel is NULL")?;
        // SAFETY: so many links, by the contract of this function.
        tunnel.0.set_links(unsafe { links(given, count) }?);
        Ok(())
    });
    // SAFETY: null or valid, by the contract of this function.
    unsafe { return_code(set, error) }
}

/// Returns the status as JSON.
///
/// # Safety
/// `tunnel` is null or of [`mpvpn_start`] and not stopped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mpvpn_status_json(tunnel: *mut mpvpn_tunnel) -> *mut c_char {
    catch_panic(ptr::null_mut(), || {
        // SAFETY: null or valid, by the contract of this function.
        let status = unsafe { tunnel.as_ref() }.and_then(|tunnel| tunnel.0.status_json());
        status.map_or(ptr::null_mut(), |status| c_string(&status).into_raw())
    })
}

/// Stops a tunnel, and frees it.
///
/// # Safety
/// `tunnel` is null or of [`mpvpn_start`]; no other function has it, now or later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mpvpn_stop(tunnel: *mut mpvpn_tunnel) {
    catch_panic((), || {
        if !tunnel.is_null() {
            // SAFETY: it came out of a box in `mpvpn_start`, and nobody else has it, by the contract of this
            // function.
            unsafe { Box::from_raw(tunnel) }.0.stop();
        }
    });
}

/// Frees a string.
///
/// # Safety
/// `string` is null or came out of a function of this library, and is freed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mpvpn_string_free(string: *mut c_char) {
    if !string.is_null() {
        // SAFETY: all these functions return strings of `CString::into_raw`.
        drop(unsafe { CString::from_raw(string) });
    }
}

/// The version.
#[unsafe(no_mangle)]
pub extern "C" fn mpvpn_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Runs `work`; returns `on_panic` if it panics.
fn catch_panic<T>(on_panic: T, work: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or(on_panic)
}

/// A duplicate of an app's descriptor.
fn duplicate(fd: c_int) -> Result<OwnedFd, String> {
    if fd < 0 {
        return Err(format!("{fd} is not a descriptor"));
    }
    // SAFETY: not negative, and open for the time of this call, or the kernel says that it is not.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    borrowed.try_clone_to_owned().map_err(|error| format!("packet_fd cannot be used: {error}"))
}

/// # Safety
/// `string` is null, or a string that ends with NUL and lives for `'a`.
unsafe fn text<'a>(string: *const c_char, what: &str) -> Result<&'a str, String> {
    if string.is_null() {
        return Err(format!("{what} is NULL"));
    }
    // SAFETY: not null, and a string, by the contract.
    unsafe { CStr::from_ptr(string) }.to_str().map_err(|_| format!("{what} is not UTF-8"))
}

/// # Safety
/// `given` has `count` valid links, or is null if there are none.
unsafe fn links(given: *const mpvpn_link, count: usize) -> Result<Vec<Link>, String> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if given.is_null() {
        return Err("links is NULL".to_owned());
    }
    // SAFETY: so many, by the contract.
    let given = unsafe { std::slice::from_raw_parts(given, count) };
    // SAFETY: each is valid, by the contract.
    given.iter().map(|link| unsafe { self::link(link) }).collect()
}

/// # Safety
/// Its strings are null or valid.
unsafe fn link(given: &mpvpn_link) -> Result<Link, String> {
    // SAFETY: null or valid, by the contract.
    let name = unsafe { text(given.name, "the name of a link") }?;
    let mut link = Link::new(name);
    if !given.address.is_null() {
        // SAFETY: valid, by the contract.
        let address = unsafe { text(given.address, "the address of a link") }?;
        let parsed = address.parse().map_err(|_| format!("`{address}` is not an address of a link"))?;
        link.address = Some(parsed);
    }
    if given.mtu != 0 {
        link.mtu = given.mtu;
    }
    Ok(link)
}

/// Parses the addresses that the app's `resolve` wrote.
fn addresses(found: &[u8]) -> Result<Vec<IpAddr>, String> {
    let end = found.iter().position(|byte| *byte == 0).unwrap_or(found.len());
    let words = std::str::from_utf8(&found[..end]).map_err(|_| "the app's addresses are not UTF-8")?;
    words
        .split_whitespace()
        .map(|word| word.parse().map_err(|_| format!("`{word}` is not an address")))
        .collect()
}

/// Writes an error for the app.
///
/// # Safety
/// `error` is null or valid.
unsafe fn set_error(error: *mut *mut c_char, reason: String) {
    if !error.is_null() {
        // SAFETY: not null, and valid by the contract.
        unsafe { *error = c_string(&reason).into_raw() };
    }
}

/// Returns 1 for success; else writes the error for the app and returns 0.
///
/// # Safety
/// `error` is null or valid.
unsafe fn return_code(result: Result<(), String>, error: *mut *mut c_char) -> c_int {
    let Err(reason) = result else { return 1 };
    // SAFETY: null or valid, by the contract.
    unsafe { set_error(error, reason) };
    0
}

/// The text of an error, with the next step if there is one.
fn error_text(error: Error) -> String {
    match error {
        Error::Control(control) => format!("{control}: {}", control.next_step()),
        other => other.to_string(),
    }
}

/// A C string without the NUL bytes of `text`.
fn c_string(text: &str) -> CString {
    CString::new(text.replace('\0', "")).unwrap_or_default()
}

/// The number and the JSON of an event.
fn encode_event(event: &Event) -> (c_int, CString) {
    let (kind, value) = match event {
        Event::Down(reason) => (0, json!({ "reason": reason })),
        Event::Up(network) => {
            let (addresses, routes, mtu) = (&network.addresses, &network.routes, network.mtu);
            (1, json!({ "addresses": addresses, "routes": routes, "mtu": mtu }))
        }
        Event::Failed(reason) => (2, json!({ "reason": reason })),
    };
    (kind, c_string(&value.to_string()))
}

fn level(number: c_int) -> Option<Level> {
    Some(match number {
        1 => Level::ERROR,
        2 => Level::WARN,
        3 => Level::INFO,
        4 => Level::DEBUG,
        5.. => Level::TRACE,
        _ => return None,
    })
}

fn number(level: Level) -> c_int {
    match level {
        Level::ERROR => 1,
        Level::WARN => 2,
        Level::INFO => 3,
        Level::DEBUG => 4,
        Level::TRACE => 5,
    }
}
