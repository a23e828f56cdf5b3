//! The plan for a client, and how one over SSH is taken back or confirmed.

use toml_edit::{DocumentMut, value};

use super::{
    instance::Instance,
    machine::{MachineFacts, ServiceChange},
    plan::{Action, Audience, Plan, Step},
    record::{Record, Rollback},
};
use mpvpn_config::ClientConfig;
use mpvpn_input::Result;
use mpvpn_users::join::JoinLink;

/// Seconds until a setup over SSH is taken back. Chosen: a reader with a new session needs some 20; longer
/// leaves a machine unreachable for longer.
pub const CONFIRM_SECONDS: u32 = 60;
/// The unit that holds the block of the kill switch from boot until clients run.
pub const KILL_SWITCH_UNIT: &str = "mpvpn-kill-switch.service";

/// The settings that the user wants for a client.
#[derive(Clone, Debug)]
pub struct ClientWishes {
    /// Which client of this machine.
    pub instance: Instance,
    /// Its join link.
    pub link: JoinLink,
    /// Whether packets past the tunnel are blocked.
    pub kill_switch: bool,
    /// Whether nobody has to confirm a setup over SSH.
    pub skips_confirmation: bool,
}

/// The plan for a client; `record` is what setup remembers of it.
///
/// # Errors
/// If the machine cannot run it, or the configuration file is for another server or cannot be understood.
pub fn plan_client(machine: &MachineFacts, wishes: &ClientWishes, record: Option<&Record>) -> Result<Plan> {
    let instance = &wishes.instance;
    machine.require_tunnels()?;
    let text = file_text(machine, wishes)?;
    let config = ClientConfig::parse(&text, &instance.file())?;
    let mut plan = Plan { found: vec![machine.describe()], ..Plan::default() };
    describe_links(machine, &mut plan);
    plan.found.push(format!("server: {}", config.server));
    let changes_file = machine.file.as_ref() != Some(&text);
    let before =
        machine.file.as_deref().and_then(|before| ClientConfig::parse(before, &instance.file()).ok());
    let needs_restart =
        before.is_none_or(|mut before| !before.apply_reload(config.clone()).restart.is_empty());
    let service_steps = machine.service_steps(instance, ServiceChange::new(changes_file, needs_restart));
    let needs_confirmation = machine.over_ssh && !wishes.skips_confirmation && !service_steps.is_empty();
    let enables_kill_switch = wishes.kill_switch
        && machine.systemd
        && machine.kill_switch_unit.exists
        && !machine.kill_switch_unit.enabled;

    if needs_confirmation {
        let mut enable = vec![format!("{}.service", instance.unit())];
        enable.extend(enables_kill_switch.then(|| KILL_SWITCH_UNIT.to_owned()));
        let rollback = Rollback {
            file: machine.file.clone(),
            record: record.cloned(),
            was_active: machine.unit.active,
            enable,
        };
        plan.steps.extend(rollback_steps(machine, instance, &rollback));
        plan.needs_confirmation = true;
    }
    plan.steps.extend(machine.group_steps());
    if changes_file {
        let write = Action::Write { path: instance.file(), text, audience: Audience::Service };
        let undo = Action::restore(instance.file(), machine.file.clone(), Audience::Service);
        plan.steps.push(Step::new(write, "", Some(undo)));
    }
    if needs_confirmation {
        let (verb, undo) = if machine.unit.active { ("restart", None) } else { ("start", Some("stop")) };
        let undo = undo.map(|verb| Action::systemctl(&[verb], instance));
        let why = "all traffic goes through the tunnel; at boot, too, once you have confirmed it";
        plan.steps.push(Step::new(Action::systemctl(&[verb], instance), why, undo));
    } else {
        plan.steps.extend(service_steps);
        if enables_kill_switch {
            let unit = |verb| Action::run(["systemctl", verb, KILL_SWITCH_UNIT]);
            let why = "packets past the tunnel are blocked from boot on";
            plan.steps.push(Step::new(unit("enable"), why, Some(unit("disable"))));
        }
    }
    machine.explain_service(instance, &mut plan);
    Ok(plan)
}

/// The text of the client's file.
fn file_text(machine: &MachineFacts, wishes: &ClientWishes) -> Result<String> {
    let instance = &wishes.instance;
    let text = wishes.link.file_text(&instance.file(), machine.file.as_deref())?;
    // The text was made by the same library.
    let Ok(mut document) = text.parse::<DocumentMut>() else { return Ok(text) };
    if wishes.kill_switch {
        document["kill-switch"] = value(true);
    }
    Ok(document.to_string())
}

fn describe_links(machine: &MachineFacts, plan: &mut Plan) {
    let links = machine.interfaces.iter().filter(|interface| interface.has_default_route);
    let names: Vec<&str> = links.map(|interface| interface.name.as_str()).collect();
    match names.as_slice() {
        [] => plan.warnings.push(
            "no interface has a default route, so the client has no links yet: it uses them as they come"
                .to_owned(),
        ),
        [one] => plan.found.push(format!(
            "link: {one}; a further interface with a default route is used, too, as soon as it comes"
        )),
        all => plan.found.push(format!("links: {}", all.join(", "))),
    }
}

/// The steps that make the machine take everything back unless somebody confirms it.
fn rollback_steps(machine: &MachineFacts, instance: &Instance, rollback: &Rollback) -> Vec<Step> {
    let path = Rollback::path(instance);
    let write = Action::Write { path: path.clone(), text: rollback.text(), audience: Audience::Root };
    let timer = Rollback::timer(instance);
    let name = instance.name().map(|name| format!("--name={name}"));
    let command = Action::run(
        [
            "systemd-run",
            "--quiet",
            "--collect",
            &format!("--unit={timer}"),
            &format!("--on-active={CONFIRM_SECONDS}"),
            "--timer-property=AccuracySec=100ms",
            &machine.program,
            "setup",
            "rollback",
        ]
        .into_iter()
        .map(str::to_owned)
        .chain(name),
    );
    let why = format!(
        "you came by SSH: in {CONFIRM_SECONDS} s everything is taken back unless you confirm that you can still reach the machine"
    );
    let stop = Action::run(["systemctl", "stop", &format!("{timer}.timer")]);
    vec![
        Step::new(write, "what there was before", Some(Action::Remove(path))),
        Step::new(command, why, Some(stop)),
    ]
}

/// The steps that take back a setup that nobody confirmed.
pub fn plan_rollback(instance: &Instance, rollback: &Rollback) -> Vec<Action> {
    let mut actions = Vec::new();
    if !rollback.was_active {
        actions.push(Action::systemctl(&["stop"], instance));
        // The kill switch's block, too.
        actions.push(Action::Reset);
    }
    let record = rollback.record.as_ref().map(Record::text);
    actions.push(Action::restore(instance.file(), rollback.file.clone(), Audience::Service));
    actions.push(Action::restore(instance.record_file(), record, Audience::Root));
    if rollback.was_active {
        actions.push(Action::systemctl(&["restart"], instance));
    }
    actions.push(Action::Remove(Rollback::path(instance)));
    actions
}

/// The steps that confirm a setup.
pub fn plan_confirmation(instance: &Instance, rollback: &Rollback) -> Vec<Action> {
    let stop = Action::run(["systemctl", "stop", &format!("{}.timer", Rollback::timer(instance))]);
    let enable = rollback.enable.iter().map(|unit| Action::run(["systemctl", "enable", unit]));
    [stop].into_iter().chain(enable).chain([Action::Remove(Rollback::path(instance))]).collect()
}

#[cfg(test)]
mod tests {
    use super::{
        super::machine::{Interface, UnitState},
        *,
    };
    use mpvpn_input::role::Role;

    fn machine() -> MachineFacts {
        let interface =
            |name: &str| Interface { name: name.into(), addresses: vec![], has_default_route: true };
        MachineFacts {
            kernel: "6.1.0".into(),
            systemd: true,
            unit: UnitState { exists: true, ..UnitState::default() },
            kill_switch_unit: UnitState { exists: true, ..UnitState::default() },
            interfaces: vec![interface("eth0"), interface("wwan0")],
            program: "/usr/bin/mpvpn".into(),
            ..MachineFacts::default()
        }
    }

    fn wishes() -> ClientWishes {
        let link = format!("mpvpn://secret@vpn.example/?pin={}", "ab".repeat(32));
        ClientWishes {
            instance: Instance::unnamed(Role::Client),
            link: link.parse().unwrap(),
            kill_switch: false,
            skips_confirmation: false,
        }
    }

    fn texts(actions: impl IntoIterator<Item = impl ToString>) -> Vec<String> {
        actions.into_iter().map(|action| action.to_string()).collect()
    }

    fn steps(plan: &Plan) -> Vec<String> {
        texts(plan.steps.iter().map(|step| &step.action))
    }

    #[test]
    fn a_client_gets_a_file_and_a_service() {
        let plan = plan_client(&machine(), &wishes(), None).unwrap();
        assert_eq!(steps(&plan), ["write /etc/mpvpn/client.toml", "systemctl enable --now mpvpn-client"]);
        assert!(!plan.needs_confirmation);
        let shown = plan.text();
        assert!(shown.contains("links: eth0, wwan0") && shown.contains("server: vpn.example:443"), "{shown}");
        assert!(!shown.contains("secret"), "{shown}");
        let Action::Write { text, .. } = &plan.steps[0].action else { panic!("{plan:?}") };
        let done = MachineFacts {
            file: Some(text.clone()),
            unit: UnitState { exists: true, enabled: true, active: true },
            ..machine()
        };
        assert_eq!(steps(&plan_client(&done, &wishes(), None).unwrap()), Vec::<String>::new());
        let blocking = plan_client(&done, &ClientWishes { kill_switch: true, ..wishes() }, None).unwrap();
        assert_eq!(
            steps(&blocking),
            [
                "write /etc/mpvpn/client.toml",
                "systemctl restart mpvpn-client",
                "systemctl enable mpvpn-kill-switch.service"
            ]
        );
    }

    #[test]
    fn over_ssh_everything_is_taken_back_unless_it_is_confirmed() {
        let machine = MachineFacts { over_ssh: true, ..machine() };
        let wishes = ClientWishes { kill_switch: true, ..wishes() };
        let plan = plan_client(&machine, &wishes, None).unwrap();
        assert!(plan.needs_confirmation);
        assert_eq!(
            steps(&plan),
            [
                "write /run/mpvpn-client-unconfirmed.json",
                "systemd-run --quiet --collect --unit=mpvpn-client-rollback --on-active=60 \
                 --timer-property=AccuracySec=100ms /usr/bin/mpvpn setup rollback",
                "write /etc/mpvpn/client.toml",
                "systemctl start mpvpn-client",
            ]
        );
        let Action::Write { text, .. } = &plan.steps[0].action else { panic!("{plan:?}") };
        let rollback: Rollback = serde_json::from_str(text).unwrap();
        assert_eq!(
            texts(plan_rollback(&wishes.instance, &rollback)),
            [
                "systemctl stop mpvpn-client",
                "mpvpn reset",
                "remove /etc/mpvpn/client.toml",
                "remove /var/lib/mpvpn/setup-mpvpn-client.json",
                "remove /run/mpvpn-client-unconfirmed.json",
            ]
        );
        assert_eq!(
            texts(plan_confirmation(&wishes.instance, &rollback)),
            [
                "systemctl stop mpvpn-client-rollback.timer",
                "systemctl enable mpvpn-client.service",
                "systemctl enable mpvpn-kill-switch.service",
                "remove /run/mpvpn-client-unconfirmed.json",
            ]
        );
        let skipped =
            plan_client(&machine, &ClientWishes { skips_confirmation: true, ..wishes }, None).unwrap();
        assert!(!skipped.needs_confirmation && skipped.steps.len() == 3, "{skipped:?}");
    }

    #[test]
    fn what_ran_before_runs_again_after_a_rollback() {
        let instance = Instance::unnamed(Role::Client);
        let rollback =
            Rollback { file: Some("x".into()), record: None, was_active: true, enable: Vec::new() };
        let actions = texts(plan_rollback(&instance, &rollback));
        assert_eq!(actions[0], "write /etc/mpvpn/client.toml");
        assert!(actions.contains(&"systemctl restart mpvpn-client".to_owned()), "{actions:?}");
    }

    #[test]
    fn a_file_for_another_server_is_an_error() {
        let machine = MachineFacts { file: Some("server = \"other.example\"\n".into()), ..machine() };
        let error = plan_client(&machine, &wishes(), None).unwrap_err();
        assert!(error.to_string().contains("is for the server other.example"), "{error}");
    }
}
