//! The machine tests, and which of them are quick.

mod boot;
mod certificate;
mod copies;
mod desktop;
mod firewalls;
mod forged;
mod instances;
mod kill_switch;
mod lifecycle;
mod ssh;
mod upgrade;
mod vlan;

/// A test of whole machines.
pub(crate) struct Story {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// The statement that the story proves.
    pub(crate) proves: &'static str,
    /// Whether it is one of the quick ones, `./dev test machines short`. They use the root file system `base`
    /// alone.
    pub(crate) is_short: bool,
    /// Panics if something is not as it should be.
    pub(crate) run: fn(),
}

/// All tests, in the order in which they run.
pub(crate) const STORIES: [Story; 15] = [
    Story {
        name: "lifecycle",
        proves: "a server and two clients are installed, joined, used, reloaded, revoked, removed and purged without a trace",
        is_short: true,
        run: lifecycle::run,
    },
    Story {
        name: "upgrade",
        proves: "an upgrade under load interrupts for 2 s at most, and addresses stay",
        is_short: true,
        run: upgrade::run,
    },
    Story {
        name: "boot",
        proves: "machines that reboot, or lose their power, join again by themselves and keep their addresses",
        is_short: true,
        run: boot::run,
    },
    Story {
        name: "kill_switch",
        proves: "with the kill switch no packet leaves past the tunnel from boot to purge, by IPv4 or IPv6",
        is_short: true,
        run: kill_switch::run,
    },
    Story {
        name: "forged",
        proves: "records that a taken-over service left make root's commands change nothing of root's",
        is_short: true,
        run: forged::run,
    },
    Story {
        name: "certificate",
        proves: "a server gets a new certificate, and no client loses a ping",
        is_short: false,
        run: certificate::run,
    },
    Story {
        name: "instances",
        proves: "several servers and clients on one machine run side by side, and leave nothing behind",
        is_short: false,
        run: instances::run,
    },
    Story {
        name: "copied_state",
        proves: "a machine with a copy of another one's state folder gets addresses of its own, and both are told",
        is_short: false,
        run: copies::state_folder,
    },
    Story {
        name: "copied_program",
        proves: "the package over a copied program and unit names both, interrupts nothing, and takes over the settings",
        is_short: false,
        run: copies::program,
    },
    Story {
        name: "ssh",
        proves: "a client that is set up over SSH is taken back, unless somebody confirms it",
        is_short: false,
        run: ssh::run,
    },
    Story {
        name: "desktop",
        proves: "a client works with NetworkManager and systemd-resolved, and leaves both as they were",
        is_short: false,
        run: desktop::run,
    },
    Story {
        name: "ufw",
        proves: "a server is set up behind ufw, which gets its rules and loses them again",
        is_short: false,
        run: firewalls::ufw,
    },
    Story {
        name: "firewalld",
        proves: "the same with firewalld",
        is_short: false,
        run: firewalls::firewalld,
    },
    Story {
        name: "nftables",
        proves: "the same with a chain of nftables that drops",
        is_short: false,
        run: firewalls::nftables,
    },
    Story {
        name: "vlan",
        proves: "with Debian's kernel VLANs are links of a client, and sources of the packets of a class",
        is_short: false,
        run: vlan::run,
    },
];
