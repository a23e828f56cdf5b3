//! When packets of a path are protected, and by how much.

use mpvpn_types::Fec;

/// Packets of a path are protected when it loses this share of them.
const ON: f64 = 0.02;
/// And not any more when it loses less than this.
const OFF: f64 = 0.01;
/// The share of packets that may be lost in spite of repair: those are sent again.
const RESIDUAL: f64 = 0.003;
/// On a full path it may be this part of what is lost, if that is more. There repair takes the place of data, packet for
/// packet, and so does what is sent again: to repair nearly all costs more than to send some of it again.
const FULL_PATH_RESIDUAL_SHARE: f64 = 0.3;
/// Packets of a group: few enough to be repaired soon, many enough that losses are spread over groups evenly.
const AUTO_GROUP_SIZE: u8 = 20;
/// The same on a full path, where the next ones are there already. More would save little, and each repair is made of all.
const FULL_PATH_GROUP_SIZE: u8 = 32;
/// Repair is no more than this share of the data.
const MAX_AUTO_SHARE: f64 = 0.3;
/// A plan is made for steps of loss.
const STEP: f64 = 0.005;

/// What packets meet on their path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Load {
    /// They leave as they come.
    Light,
    /// They wait until there is room.
    Full,
}

/// How the packets of a path are protected.
#[derive(Clone, Debug, PartialEq)]
pub struct RepairPlan {
    /// The share of the data, in bytes, that repair may be.
    pub max_share: f64,
    light: Sizes,
    full: Sizes,
}

/// Packets of repair for a group of so many packets and one, up to the largest group.
type Sizes = Vec<u8>;

impl RepairPlan {
    fn sizes(&self, load: Load) -> &Sizes {
        if load == Load::Full { &self.full } else { &self.light }
    }

    /// Whether groups depend on the load.
    pub fn depends_on_load(&self) -> bool {
        self.full != self.light
    }

    /// Packets of a group, at most; 64 at most.
    pub fn max_group_size(&self, load: Load) -> usize {
        self.sizes(load).len()
    }

    /// Packets of repair for a group of `data` packets that is full or will not become full.
    pub fn repair_count(&self, data: usize, load: Load) -> u8 {
        // It may have become larger than the load allows by now.
        let size = |at: usize| self.sizes(load).get(at).or_else(|| self.full.get(at));
        data.checked_sub(1).and_then(size).copied().unwrap_or(0)
    }

    /// Repair in percent of the data, at most.
    pub fn repair_percent(&self) -> u8 {
        let data = self.max_group_size(Load::Light);
        let repair = f64::from(self.repair_count(data, Load::Light)) / data.max(1) as f64;
        (repair.min(self.max_share) * 100.0).round() as u8
    }

    fn fixed(data: u8, repair: u8) -> Self {
        // Part of a group has its part of the repair.
        let part = |of: u8| (u16::from(repair) * u16::from(of)).div_ceil(data.max(1).into()) as u8;
        let most = f64::from(repair) / f64::from(data.max(1));
        let sizes: Sizes = (1..=data.min(Fec::MAX_DATA)).map(part).collect();
        Self { max_share: most, light: sizes.clone(), full: sizes }
    }

    fn auto(loss: f64) -> Self {
        let light = (1..=AUTO_GROUP_SIZE).map(|data| repairs(data, loss, RESIDUAL)).collect();
        let most_lost = RESIDUAL.max(loss * FULL_PATH_RESIDUAL_SHARE);
        let full = (1..=FULL_PATH_GROUP_SIZE).map(|data| repairs(data, loss, most_lost)).collect();
        Self { max_share: MAX_AUTO_SHARE, light, full }
    }
}

/// How many packets of repair `data` packets need where the share `loss` of all is lost, and `most_lost` may be in the end.
fn repairs(data: u8, loss: f64, most_lost: f64) -> u8 {
    let enough = |repair: &u8| residual(data, *repair, loss) <= most_lost;
    (1..=Fec::MAX_REPAIR).find(enough).unwrap_or(Fec::MAX_REPAIR)
}

/// The share of packets that is lost in spite of repair.
fn residual(data: u8, repair: u8, loss: f64) -> f64 {
    let (all, odds) = (u32::from(data) + u32::from(repair), loss / (1.0 - loss));
    let mut chance = (1.0 - loss).powi(all as i32);
    let mut sum = 0.0;
    for lost in 0..=all {
        if lost > u32::from(repair) {
            sum += chance * f64::from(lost) / f64::from(all);
        }
        chance *= odds * f64::from(all - lost) / f64::from(lost + 1);
    }
    sum
}

/// Watches how much a path loses.
#[derive(Clone, Debug, Default)]
pub struct LossMonitor {
    /// The plan and the loss, in steps, that it was made for.
    plan: Option<(u32, RepairPlan)>,
}

impl LossMonitor {
    /// Takes the share of packets (0 to 1) over that the path loses; returns the plan if it is another one now.
    pub fn update(&mut self, fec: Fec, loss: f64) -> Option<Option<&RepairPlan>> {
        let before = self.plan.as_ref().map(|(step, _)| *step);
        let step = match fec {
            Fec::Off => None,
            Fec::Fixed { .. } => Some(0),
            Fec::Auto if loss < if before.is_some() { OFF } else { ON } => None,
            Fec::Auto => {
                let step = (loss.min(0.5) / STEP).ceil() as u32;
                // Within a step nothing changes.
                Some(before.filter(|before| before.abs_diff(step) <= 1).unwrap_or(step))
            }
        };
        if step == before {
            return None;
        }
        self.plan = step.map(|step| match fec {
            Fec::Fixed { data, repair } => (step, RepairPlan::fixed(data, repair)),
            _ => (step, RepairPlan::auto(f64::from(step) * STEP)),
        });
        Some(self.plan.as_ref().map(|(_, plan)| plan))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repair_grows_with_the_loss() {
        assert_eq!([0.005, 0.02, 0.05, 0.12].map(|loss| repairs(20, loss, RESIDUAL)), [1, 2, 4, 8]);
        assert!(residual(20, 6, 0.12) < 0.01);
        assert!((residual(1, 1, 0.5) - 0.25).abs() < 1e-9);
        assert!((residual(10, 0, 0.1) - 0.1).abs() < 1e-9, "without repair all that is lost");
    }

    #[test]
    fn a_full_path_carries_more_data_with_less_repair() {
        for loss in [0.03, 0.05, 0.08, 0.12] {
            let plan = RepairPlan::auto(loss);
            // A packet takes its place, its part of the repair's, and that of being sent again, maybe more than once.
            let carried = |load| {
                let data = plan.max_group_size(load);
                let repair = f64::from(plan.repair_count(data, load)).min(plan.max_share * data as f64);
                let lost = residual(data as u8, repair as u8, loss);
                1.0 / (1.0 + repair / data as f64 + lost / (1.0 - loss))
            };
            let (light, full) = (carried(Load::Light), carried(Load::Full));
            assert!(full > light + 0.03, "{loss}: {full} of the packets are data, {light} with a light load");
            assert!(full > 0.9 * (1.0 - loss), "{loss}: {full} of the packets are data");
        }
        assert_eq!(RepairPlan::auto(0.12).repair_count(32, Load::Full), 6);
    }

    #[test]
    fn protection_comes_and_goes_with_the_loss_without_flapping() {
        let mut watch = LossMonitor::default();
        let mut is_on = false;
        let mut changes = 0;
        for loss in [0.0, 0.015, 0.019, 0.021, 0.019, 0.015, 0.011, 0.02, 0.009, 0.015, 0.019, 0.0] {
            if let Some(plan) = watch.update(Fec::Auto, loss) {
                changes += usize::from(is_on != plan.is_some());
                is_on = plan.is_some();
            }
        }
        assert_eq!((changes, is_on), (2, false));
    }

    #[test]
    fn a_plan_stays_while_the_loss_is_about_the_same() {
        let mut watch = LossMonitor::default();
        assert!(watch.update(Fec::Auto, 0.12).is_some());
        assert!(watch.update(Fec::Auto, 0.118).is_none() && watch.update(Fec::Auto, 0.123).is_none());
        let plan = watch.update(Fec::Auto, 0.05).flatten().unwrap();
        assert_eq!([20, 0, 21, 33].map(|data| plan.repair_count(data, Load::Light)), [4, 0, 3, 0]);
        assert_eq!((plan.max_group_size(Load::Light), plan.repair_percent()), (20, 20));
    }

    #[test]
    fn what_was_asked_for_is_done_whatever_is_lost() {
        let mut watch = LossMonitor::default();
        let plan = watch.update(Fec::Fixed { data: 10, repair: 3 }, 0.0).flatten().unwrap();
        for load in [Load::Light, Load::Full] {
            assert_eq!([1, 3, 4, 7, 10].map(|data| plan.repair_count(data, load)), [1, 1, 2, 3, 3]);
        }
        assert!((plan.max_share - 0.3).abs() < 1e-9);
        assert!(watch.update(Fec::Off, 0.0).unwrap().is_none());
    }
}
