use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf, time::Duration};

use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::*;
use crate::{
    expiry::ExpiryOption,
    file::{LockedUsers, SettingsChange, UserSettings},
    quotas::UserQuotas,
    text::{render_user, render_users},
};

fn at(text: &str) -> SystemTime {
    OffsetDateTime::parse(text, &Rfc3339).unwrap().into()
}

struct Home {
    folder: tempfile::TempDir,
}

impl Home {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("users.toml")
    }

    fn open(&self) -> LockedUsers {
        LockedUsers::open(&self.path()).unwrap()
    }

    fn text(&self) -> String {
        fs::read_to_string(self.path()).unwrap()
    }
}

#[test]
fn a_user_is_added_rotated_revoked_and_removed_and_the_file_never_has_a_token() {
    let (home, now) = (Home::new(), SystemTime::now());
    let alice = home.open().add("alice", &UserSettings::default()).unwrap();
    let bob = home.open().add("bob", &UserSettings::default()).unwrap();
    assert_eq!(fs::metadata(home.path()).unwrap().permissions().mode() & 0o777, 0o600);
    let check =
        |token: &Token| Users::load(&home.path()).unwrap().user_with(token, now).map(|user| user.name);
    assert_eq!((check(&alice), check(&bob)), (Ok("alice".into()), Ok("bob".into())));

    let new = home.open().rotate("alice").unwrap();
    assert_eq!((check(&alice), check(&new)), (Err(Denied::Unknown), Ok("alice".into())));
    home.open().revoke("bob").unwrap();
    assert_eq!(check(&bob), Err(Denied::Revoked));
    let again = home.open().rotate("bob").unwrap();
    assert_eq!((check(&bob), check(&again)), (Err(Denied::Unknown), Ok("bob".into())));
    home.open().remove("bob").unwrap();
    assert_eq!(check(&again), Err(Denied::Unknown));
    assert!([alice, bob, new, again].iter().all(|token| !home.text().contains(&token.reveal()[6..])));
}

#[test]
fn what_people_wrote_into_the_file_stays() {
    let home = Home::new();
    let hash = "ab".repeat(32);
    let text = format!(
        "# ours\n\n[[user]] # the boss\nname = 'eve'\ntoken-sha256 = '{hash}'\nexpires = '2030-01-31'\n"
    );
    fs::write(home.path(), &text).unwrap();
    fs::set_permissions(home.path(), fs::Permissions::from_mode(0o640)).unwrap();
    home.open().add("alice", &UserSettings::default()).unwrap();
    assert!(home.text().starts_with(&text), "{}", home.text());
    assert_eq!(fs::metadata(home.path()).unwrap().permissions().mode() & 0o777, 0o640);
    home.open().remove("alice").unwrap();
    assert_eq!(home.text(), text);
    // The short form means the same.
    fs::write(home.path(), format!("user = [{{ name = 'eve', token-sha256 = '{hash}' }}]\n")).unwrap();
    home.open().revoke("eve").unwrap();
    assert!(home.open().users().get("eve").unwrap().revoked);
}

#[test]
fn settings_are_written_and_read_again() {
    let home = Home::new();
    let settings = UserSettings {
        expires: Some(Expiry::read("2027-01-31").unwrap()),
        address: vec!["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()],
        route: vec!["192.168.7.0/24".parse().unwrap(), "fd07::/48".parse().unwrap()],
        sessions: Some(3),
        up: Some(BitRate::from_bps(1_500_000)),
        down: Some(BitRate::from_bps(20_000_000)),
        quota: Some(ByteSize::from_bytes(50_500_000_000)),
    };
    home.open().add("alice", &settings).unwrap();
    let settings_of = |name: &str| {
        let UserEntry { expires, address, route, sessions, up, down, quota, .. } =
            home.open().users().get(name).unwrap().clone();
        UserSettings { expires, address, route, sessions, up, down, quota }
    };
    assert_eq!(settings_of("alice"), settings);
    for line in ["up = \"1500kbit\"", "route = [\"192.168.7.0/24\", \"fd07::/48\"]", "quota = \"50.5GB\""] {
        assert!(home.text().contains(line), "{}", home.text());
    }
    // A setting that is not named stays, and one that is `None` goes.
    let change = SettingsChange { up: Some(None), sessions: Some(Some(4)), ..SettingsChange::default() };
    home.open().set("alice", &change).unwrap();
    let changed = UserSettings { up: None, sessions: Some(4), ..settings.clone() };
    assert_eq!(settings_of("alice"), changed);
    let all = SettingsChange::from(&UserSettings::default());
    home.open().set("alice", &all).unwrap();
    assert_eq!(settings_of("alice"), UserSettings::default());
    home.open().set("alice", &SettingsChange::from(&settings)).unwrap();
    let error = home.open().set("bob", &all).unwrap_err().to_string();
    assert!(error.contains("there is no user `bob`"), "{error}");
    let error = home.open().add("bob", &settings).unwrap_err().to_string();
    assert!(error.contains("the address 10.0.0.7 twice, of `alice` and `bob`"), "{error}");
    assert!(home.open().users().get("bob").is_none());
}

#[test]
fn access_ends_after_the_last_day_and_the_user_is_told() {
    let home = Home::new();
    let expires = Some(Expiry::read("2027-01-31").unwrap());
    let token = home.open().add("alice", &UserSettings { expires, ..UserSettings::default() }).unwrap();
    let users = Users::load(&home.path()).unwrap();
    let (before, end) = (at("2027-01-31T23:59:59Z"), at("2027-02-01T00:00:00Z"));
    assert!(users.user_with(&token, before).is_ok());
    let denied = users.user_with(&token, end).unwrap_err();
    assert_eq!(denied.to_string(), "the access of this user ended on 2027-01-31");
    assert_eq!((users.next_expiry(before), users.next_expiry(end)), (Some(end), None));
    assert_eq!(users.ended_since(&users, before), BTreeMap::new());
    assert_eq!(users.ended_since(&users, end).len(), 1);
    let moment = Expiry::read("2027-01-31T18:00:00+02:00").unwrap();
    assert_eq!(
        (moment.at(), moment.to_string()),
        (at("2027-01-31T16:00:00Z"), "2027-01-31T16:00:00Z".into())
    );
}

#[test]
fn days_count_to_the_end_of_the_last_one() {
    let now = at("2026-11-26T15:00:00Z");
    let option = |text: &str| text.parse::<ExpiryOption>().map(|option| option.resolve(now).to_string());
    assert_eq!(option("90d"), Ok("2027-02-24".into()));
    assert_eq!(option("0d"), Ok("2026-11-26".into()));
    assert_eq!(option("2027-01-31"), Ok("2027-01-31".into()));
    assert!(option("soon").unwrap_err().contains("neither a number of days, as in 90d"));
    assert!(option("2027-02-30").is_err() && option("99999d").is_err());
}

#[test]
fn sessions_end_for_who_was_removed_revoked_or_has_a_new_token_and_for_nobody_else() {
    let home = Home::new();
    for name in ["alice", "bob", "carol", "dave"] {
        home.open().add(name, &UserSettings::default()).unwrap();
    }
    let (before, now) = (Users::load(&home.path()).unwrap(), SystemTime::now());
    home.open().remove("alice").unwrap();
    home.open().revoke("bob").unwrap();
    home.open().rotate("carol").unwrap();
    home.open().add("erin", &UserSettings::default()).unwrap();
    let ended = Users::load(&home.path()).unwrap().ended_since(&before, now);
    let reasons: Vec<_> = ended.iter().map(|(name, reason)| (name.as_str(), reason.as_str())).collect();
    assert_eq!(
        reasons,
        [
            ("alice", "the user was removed"),
            ("bob", "the access of this user was revoked"),
            ("carol", "the user has a new token")
        ]
    );
}

#[test]
fn the_table_tells_who_has_access() {
    let hash = |n: u8| format!("{n:02x}").repeat(32);
    let text = format!(
        "[[user]]\nname=\"alice\"\ntoken-sha256=\"{}\"\nsessions=2\naddress=\"10.0.0.7\"\n\
         [[user]]\nname=\"bob\"\ntoken-sha256=\"{}\"\nrevoked=true\n\
         [[user]]\nname=\"carol\"\ntoken-sha256=\"{}\"\nexpires=\"2020-01-31\"\n",
        hash(1),
        hash(2),
        hash(3)
    );
    let users = Users::parse(text.as_bytes(), "users.toml".as_ref()).unwrap();
    let (quotas, now) = (UserQuotas::default(), SystemTime::now());
    assert_eq!(
        render_users(&users, &quotas, now, 80),
        "user   state    expires     sessions  address\n\
         alice  active   –           2         10.0.0.7\n\
         bob    revoked  –           –         –\n\
         carol  expired  2020-01-31  –         –\n"
    );
    assert!(render_users(&Users::default(), &quotas, now, 80).contains("mpvpn user add"));
}

#[test]
fn mistakes_name_what_is_wrong_and_change_nothing() {
    let home = Home::new();
    home.open().add("alice", &UserSettings::default()).unwrap();
    let text = home.text();
    let mut locked = home.open();
    for (error, said, next) in [
        (
            locked.add("alice", &UserSettings::default()).unwrap_err(),
            "there is a user `alice`",
            "rotate alice",
        ),
        (locked.add("a b", &UserSettings::default()).unwrap_err(), "`a b` cannot be", "letters"),
        (locked.add("", &UserSettings::default()).unwrap_err(), "`` cannot be", "letters"),
        (locked.revoke("bob").unwrap_err(), "there is no user `bob`", "users are: alice"),
        (locked.rotate("bob").unwrap_err(), "there is no user `bob`", "users are: alice"),
        (locked.remove("bob").unwrap_err(), "there is no user `bob`", "users are: alice"),
    ] {
        let (text, advice) = (error.to_string(), error.next_step());
        assert!(text.contains(said) && advice.contains(next), "{text} / {advice}");
    }
    assert_eq!(home.text(), text);
}

#[test]
fn two_that_add_at_once_both_succeed() {
    let home = Home::new();
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let path = home.path();
            scope.spawn(move || {
                for number in 0..5 {
                    let mut users = LockedUsers::open(&path).unwrap();
                    users.add(&format!("user-{thread}-{number}"), &UserSettings::default()).unwrap();
                }
            });
        }
    });
    assert_eq!(home.open().users().iter().count(), 40);
}

#[test]
fn a_damaged_file_is_an_error_that_names_it() {
    let home = Home::new();
    let hash = "00".repeat(32);
    let twice = format!("[[user]]\nname='a'\ntoken-sha256='{hash}'\n").repeat(2);
    let same_token =
        format!("[[user]]\nname='a'\ntoken-sha256='{hash}'\n[[user]]\nname='b'\ntoken-sha256='{hash}'");
    let expires = format!("[[user]]\nname='a'\ntoken-sha256='{hash}'\nexpires='soon'");
    for (content, said) in [
        ("user = 3", "expected"),
        ("[[user]]\nname='a'\ntoken-sha256='12'", "`12` is not a SHA-256"),
        ("[[user]]\nname='a'\npassword='12'", "unknown field `password`"),
        (&twice, "user `a` twice"),
        (&same_token, "users `a` and `b` with the same token"),
        (&expires, "`soon` is not a date"),
    ] {
        fs::write(home.path(), content).unwrap();
        for error in [Users::load(&home.path()).unwrap_err(), LockedUsers::open(&home.path()).unwrap_err()] {
            let error = error.to_string();
            assert!(error.contains(said) && error.contains("users.toml"), "{error}");
        }
        assert_eq!(home.text(), content);
    }
}

#[test]
fn a_guess_costs_little_among_ten_thousand_users() {
    let entry = |number: usize| UserEntry {
        name: format!("user-{number}"),
        token_sha256: Some(Fingerprint([number as u8; 32].map(|byte| byte ^ (number >> 8) as u8))),
        revoked: false,
        expires: None,
        address: Vec::new(),
        route: Vec::new(),
        sessions: None,
        up: None,
        down: None,
        quota: None,
    };
    let mut all: Vec<_> = (0..MAX_USERS - 1).map(entry).collect();
    // Different users have different tokens.
    for (number, entry) in all.iter_mut().enumerate() {
        entry.token_sha256.as_mut().unwrap().0[..8].copy_from_slice(&(number as u64).to_be_bytes());
    }
    let token = Token::generate().unwrap();
    all.push(UserEntry { name: "alice".into(), token_sha256: Some(Fingerprint(token.hash())), ..entry(1) });
    let (users, now) = (Users::new(all).unwrap(), SystemTime::now());
    let guesses: Vec<Token> = (0..20_000).map(|number| format!("guess{number}").parse().unwrap()).collect();
    let start = std::time::Instant::now();
    assert!(guesses.iter().all(|guess| users.user_with(guess, now) == Err(Denied::Unknown)));
    // 20 microseconds each; comparing with all took some 50 times as long.
    assert!(start.elapsed() < Duration::from_millis(400), "{:?}", start.elapsed());
    assert_eq!(users.user_with(&token, now).unwrap().name, "alice");
}

/// The users alice with a quota of 1 GB, and bob with none.
fn with_quota() -> Users {
    let text = format!(
        "[[user]]\nname=\"alice\"\ntoken-sha256=\"{}\"\nquota=\"1GB\"\ndown=\"20mbit\"\n\
         [[user]]\nname=\"bob\"\ntoken-sha256=\"{}\"\n",
        "01".repeat(32),
        "02".repeat(32)
    );
    Users::parse(text.as_bytes(), "users.toml".as_ref()).unwrap()
}

#[test]
fn a_quota_lasts_for_a_calendar_month_also_over_restarts() {
    let home = Home::new();
    let (users, now) = (with_quota(), at("2026-11-26T12:00:00Z"));
    let mut quotas = UserQuotas::load(&UserQuotas::file(home.folder.path(), "mpvpn0")).unwrap();
    quotas.count(now, &users, [("alice", 600_000_000), ("bob", 5_000_000_000), ("nobody", 1)]);
    assert!(quotas.is_changed());
    assert_eq!((quotas.used(now, "alice"), quotas.used(now, "bob")), (600_000_000, 0));
    assert!(quotas.used_up(now, &users).is_empty());
    quotas.save().unwrap();
    assert!(!quotas.is_changed());

    assert_eq!(
        UserQuotas::read(home.folder.path()).unwrap().used(now, "alice"),
        600_000_000,
        "for a command"
    );
    let mut quotas = UserQuotas::load(&UserQuotas::file(home.folder.path(), "mpvpn0")).unwrap();
    quotas.count(now, &users, [("alice", 400_000_000)]);
    let used_up = quotas.used_up(now, &users);
    let said: Vec<_> = used_up.iter().map(|(name, until)| (name.as_str(), until.to_string())).collect();
    assert_eq!(said, [("alice", "1 December".to_owned())]);
    // Access is refused, sessions end, and both say until when.
    let users = users.with_used_up(Arc::new(used_up));
    let alice = users.get("alice").unwrap();
    assert_eq!(users.state(alice, now), UserState::QuotaUsedUp);
    let ended = users.ended_since(&users, now);
    assert_eq!(
        ended.iter().map(|(name, reason)| (name.as_str(), reason.as_str())).collect::<Vec<_>>(),
        [("alice", "the quota of this user, 1 GB, is used up; it begins anew on 1 December (UTC)")]
    );
    let shown = render_users(&users, &quotas, now, 100);
    assert!(shown.contains("quota-used-up") && shown.contains("1.0 GB of 1 GB"), "{shown}");
    let head: Vec<_> = shown.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(head, ["user", "state", "expires", "sessions", "down", "quota", "address"]);
    let shown = render_user(&users, alice, &quotas, now, 100);
    assert!(shown.contains("quota     1.0 GB of 1 GB used this month (UTC)"), "{shown}");

    let (last, next) = (at("2026-11-30T23:59:59Z"), at("2026-12-01T00:00:00Z"));
    assert_eq!((quotas.used_up(last, &users).len(), quotas.used_up(next, &users).len()), (1, 0));
    assert_eq!(quotas.used(next, "alice"), 0);
}

#[test]
fn a_clock_that_jumps_renews_no_quota_for_good() {
    let (users, home) = (with_quota(), Home::new());
    let mut quotas = UserQuotas::load(&UserQuotas::file(home.folder.path(), "mpvpn0")).unwrap();
    let (november, december) = (at("2026-11-26T12:00:00Z"), at("2026-12-26T12:00:00Z"));
    quotas.count(november, &users, [("alice", 2_000_000_000)]);
    // Before the clock is set after a start, it may be at 1970.
    quotas.count(SystemTime::UNIX_EPOCH, &users, []);
    let used_up = quotas.used_up(SystemTime::UNIX_EPOCH, &users);
    assert_eq!(used_up["alice"].to_string(), "1 December");
    quotas.count(december, &users, []);
    assert!(quotas.used_up(december, &users).is_empty());
    quotas.count(november, &users, []);
    assert_eq!((quotas.used_up(november, &users).len(), quotas.used(november, "alice")), (1, 2_000_000_000));
}

#[test]
fn a_user_whose_quota_was_taken_away_or_raised_has_access_again() {
    let (users, home) = (with_quota(), Home::new());
    let now = at("2026-11-26T12:00:00Z");
    let mut quotas = UserQuotas::load(&UserQuotas::file(home.folder.path(), "mpvpn0")).unwrap();
    quotas.count(now, &users, [("alice", 2_000_000_000)]);
    let with = |quota: Option<u64>| {
        let mut all: Vec<_> = users.iter().cloned().collect();
        all[0].quota = quota.map(ByteSize::from_bytes);
        Users::new(all).unwrap().with_used_up(Arc::new(quotas.used_up(now, &users)))
    };
    let state = |users: &Users| users.state(users.get("alice").unwrap(), now);
    assert_eq!(state(&with(Some(1_000_000_000))), UserState::QuotaUsedUp);
    assert_eq!(state(&with(None)), UserState::Active);
    assert!(quotas.used_up(now, &with(Some(3_000_000_000))).is_empty());
    // Nothing is kept about users without a quota.
    let without = with(None);
    quotas.count(now, &without, []);
    assert_eq!(quotas.used(now, "alice"), 0);
}

#[test]
fn what_cannot_be_written_is_not_forgotten() {
    let (users, home, now) = (with_quota(), Home::new(), SystemTime::now());
    let mut quotas = UserQuotas::load(&UserQuotas::file(home.folder.path(), "mpvpn0")).unwrap();
    quotas.count(now, &users, [("alice", 5)]);
    // A folder in the place of the file, as nothing else fails for root.
    let file = UserQuotas::file(home.folder.path(), "mpvpn0");
    fs::create_dir(&file).unwrap();
    let error = quotas.save().unwrap_err().to_string();
    assert!(error.contains("user-quotas-mpvpn0.json"), "{error}");
    assert!(quotas.is_changed());
    fs::remove_dir(&file).unwrap();
    quotas.save().unwrap();
    assert_eq!(
        UserQuotas::load(&UserQuotas::file(home.folder.path(), "mpvpn0")).unwrap().used(now, "alice"),
        5
    );
}

#[test]
fn a_removed_user_leaves_no_usage_to_the_next_one_of_that_name() {
    let (home, now) = (Home::new(), SystemTime::now());
    let quota = Some(ByteSize::from_bytes(10_000_000));
    home.open().add("alice", &UserSettings { quota, ..UserSettings::default() }).unwrap();
    let folder = home.folder.path();
    let mut quotas = UserQuotas::load(&UserQuotas::file(folder, "server")).unwrap();
    quotas.count(now, &Users::load(&home.path()).unwrap(), [("alice", 500)]);
    quotas.save().unwrap();
    let used = || UserQuotas::read(folder).unwrap().used(now, "alice");
    UserQuotas::forget(folder, "bob").unwrap();
    assert_eq!(used(), 500);
    UserQuotas::forget(folder, "alice").unwrap();
    assert_eq!(used(), 0);
}
