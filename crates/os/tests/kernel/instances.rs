//! Several instances on one machine, against the kernel.

use mpvpn_os::{
    UndoJournal,
    netlink::Netlink,
    sysctl,
    tunnel_net::{ClientNet, ClientNetConfig, Routes},
    undo::INSTANCE_NUMBERS,
};

use crate::{
    common::{Folder, assert_becomes, in_namespace},
    network::{outgoing_interface, route_get, state, tun, uplink, wanted},
};

#[test]
fn two_clients_have_routes_of_their_own_and_one_that_ends_leaves_those_of_the_other() {
    in_namespace(|| {
        uplink();
        let folder = Folder::new();
        let before = state();
        let eth0 = Netlink::open().unwrap().index_of("eth0").ok();
        let ((first_tun, t0), (second_tun, t1)) = (tun("t0"), tun("t1"));
        let [by_first, by_second] = [Some(t0.index), Some(t1.index)];
        let [mut first_undo, mut second_undo] =
            ["t0", "t1"].map(|name| UndoJournal::open(&folder.0, name).unwrap());
        let numbers = [&mut first_undo, &mut second_undo]
            .map(|undo| undo.take_number(&INSTANCE_NUMBERS, None).unwrap());
        let configs = [ClientNetConfig::new(t0, numbers[0]), ClientNetConfig::new(t1.clone(), numbers[1])];
        let marks = configs.each_ref().map(|config| Some(config.mark()));
        let [mut first, mut second] = configs.map(|config| ClientNet::new(config).unwrap());
        first.apply(&mut first_undo, &wanted(&["10.9.0.2/24"], Routes::All, 1400)).unwrap();
        second.apply(&mut second_undo, &wanted(&["10.8.0.2/24"], Routes::All, 1400)).unwrap();
        assert_eq!(outgoing_interface("203.0.113.1", None), by_first);
        assert_eq!(route_get("203.0.113.1 from 10.8.0.2"), by_second);
        assert_eq!(
            (outgoing_interface("10.9.0.1", None), outgoing_interface("10.8.0.1", None)),
            (by_first, by_second)
        );
        assert_eq!(
            marks.map(|mark| outgoing_interface("203.0.113.1", mark)),
            [eth0; 2],
            "a tunnel is inside the other"
        );

        // One that would use the numbers of the first is refused, and takes nothing away from it.
        let mut third_undo = UndoJournal::open(&folder.0, "third").unwrap();
        let mut third = ClientNet::new(ClientNetConfig::new(t1, numbers[0])).unwrap();
        let error = third.apply(&mut third_undo, &wanted(&["10.7.0.2/24"], Routes::All, 1400)).unwrap_err();
        assert!(error.to_string().contains("mpvpn reset"), "{error}");
        drop(third_undo);
        assert_eq!(
            (outgoing_interface("203.0.113.1", None), outgoing_interface("203.0.113.1", marks[0])),
            (by_first, eth0)
        );

        first.clear(&mut first_undo).unwrap();
        assert_eq!(outgoing_interface("203.0.113.1", None), by_second);
        first.apply(&mut first_undo, &wanted(&["10.9.0.2/24"], Routes::All, 1400)).unwrap();
        assert_eq!(second_undo.revert_all_steps().len(), 0);
        assert_eq!(outgoing_interface("203.0.113.1", None), by_first);
        drop((first_undo, second_undo, first_tun, second_tun));
        assert_becomes(&before, state);
    });
}

#[test]
fn a_kernel_parameter_stays_until_the_last_instance_that_needs_it_ends() {
    in_namespace(|| {
        uplink();
        let folder = Folder::new();
        let [mut first, mut second] = ["a", "b"].map(|name| UndoJournal::open(&folder.0, name).unwrap());
        const KEY: &str = "net/ipv4/ip_forward";
        let forwards = || sysctl::read(KEY).unwrap() == "1";
        assert!(!forwards());
        first.set_sysctl(KEY, "1").unwrap();
        second.set_sysctl(KEY, "1").unwrap();
        assert!(first.revert_all_steps().is_empty() && forwards(), "the second needs it");
        first.set_sysctl(KEY, "1").unwrap();
        assert!(second.revert_all_steps().is_empty() && forwards(), "the first needs it again");
        assert!(first.revert_all_steps().is_empty() && !forwards());
        drop((first, second));
        folder.assert_empty();
    });
}
