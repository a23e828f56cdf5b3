//! When the packets of a path are protected, and by how many repair packets.

use mpvpn_types::Fec;

/// The share of lost packets from which a path is protected. Lower: repair where retransmission is cheaper;
/// higher: calls miss packets. Chosen (docs/design/fec.md).
const PROTECT_FROM_LOSS: f64 = 0.02;
/// The share of lost packets below which protection ends; less than [`PROTECT_FROM_LOSS`], so that it does
/// not flap. Chosen.
const PROTECT_DOWN_TO_LOSS: f64 = 0.01;
/// The share of packets that may stay lost in spite of repair, and are sent again. Lower: more repair;
/// higher: more packets arrive a round trip later.
const MAX_RESIDUAL: f64 = 0.003;
/// On a full path this part of the losses may stay, if it is more than [`MAX_RESIDUAL`]. There each repair
/// packet and each retransmission displaces a packet of data: at 12 % loss 40 % of repair leave 0.1 %
/// missing, 19 % leave 3 %.
const FULL_PATH_RESIDUAL_SHARE: f64 = 0.3;
/// Source packets of a full group. Fewer: losses are spread unevenly over groups, so more repair; more:
/// repair comes later.
const AUTO_GROUP_SIZE: u8 = 20;
/// Source packets of a full group on a full path, where the next packets wait already. More saves little, and
/// each repair packet is computed from all of them.
const FULL_PATH_GROUP_SIZE: u8 = 32;
/// The largest share of repair, of the bytes of the data. Smaller: less is restored at more than 15 % loss;
/// larger: less data. Chosen.
const MAX_AUTO_SHARE: f64 = 0.3;
/// Plans are made for multiples of this share of lost packets. Smaller: plans change all the time; larger:
/// repair does not fit the loss.
const LOSS_STEP: f64 = 0.005;

/// Whether packets wait for their path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Load {
    /// Packets leave at once.
    Light,
    /// Packets wait for available window.
    Full,
}

/// How the packets of a path are protected.
#[derive(Clone, Debug, PartialEq)]
pub struct RepairPlan {
    /// The largest share of repair, of the bytes of the data.
    pub max_share: f64,
    light: RepairCounts,
    full: RepairCounts,
}

/// The number of repair packets, indexed by the number of source packets less one, up to the largest group.
type RepairCounts = Vec<u8>;

impl RepairPlan {
    fn repair_counts(&self, load: Load) -> &RepairCounts {
        if load == Load::Full { &self.full } else { &self.light }
    }

    /// Whether groups differ by the load.
    pub fn depends_on_load(&self) -> bool {
        self.full != self.light
    }

    /// Source packets of a full group, at most 64.
    pub fn max_group_size(&self, load: Load) -> usize {
        self.repair_counts(load).len()
    }

    /// Repair packets for a closed group of `data` source packets.
    pub fn repair_count(&self, data: usize, load: Load) -> u8 {
        // The group may be larger than this load allows, if the load has changed meanwhile.
        let size = |at: usize| self.repair_counts(load).get(at).or_else(|| self.full.get(at));
        data.checked_sub(1).and_then(size).copied().unwrap_or(0)
    }

    /// The share of repair in percent of the data, for a full group without load.
    pub fn repair_percent(&self) -> u8 {
        let data = self.max_group_size(Load::Light);
        let repair = f64::from(self.repair_count(data, Load::Light)) / data.max(1) as f64;
        (repair.min(self.max_share) * 100.0).round() as u8
    }

    fn fixed(data: u8, repair: u8) -> Self {
        // A smaller group gets a proportional number of repair packets.
        let part = |of: u8| (u16::from(repair) * u16::from(of)).div_ceil(data.max(1).into()) as u8;
        let most = f64::from(repair) / f64::from(data.max(1));
        let repair_counts: RepairCounts = (1..=data.min(Fec::MAX_DATA)).map(part).collect();
        Self { max_share: most, light: repair_counts.clone(), full: repair_counts }
    }

    fn auto(loss: f64) -> Self {
        let light =
            (1..=AUTO_GROUP_SIZE).map(|data| required_repair_packets(data, loss, MAX_RESIDUAL)).collect();
        let max_residual = MAX_RESIDUAL.max(loss * FULL_PATH_RESIDUAL_SHARE);
        let full = (1..=FULL_PATH_GROUP_SIZE)
            .map(|data| required_repair_packets(data, loss, max_residual))
            .collect();
        Self { max_share: MAX_AUTO_SHARE, light, full }
    }
}

/// How many repair packets `data` source packets need if the share `loss` of all packets is lost, and the
/// share `max_residual` may stay lost.
fn required_repair_packets(data: u8, loss: f64, max_residual: f64) -> u8 {
    let enough = |repair: &u8| residual(data, *repair, loss) <= max_residual;
    (1..=Fec::MAX_REPAIR).find(enough).unwrap_or(Fec::MAX_REPAIR)
}

/// The expected share of packets that stay lost in spite of repair, by the binomial distribution.
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

/// Chooses the plan of a path by its measured loss.
#[derive(Clone, Debug, Default)]
pub struct LossMonitor {
    /// The loss, in steps, and the plan for it.
    plan: Option<(u32, RepairPlan)>,
}

impl LossMonitor {
    /// Takes the share of packets (0 to 1) that the path loses; returns the plan if it has changed:
    /// `Some(None)` ends the protection.
    pub fn update(&mut self, fec: Fec, loss: f64) -> Option<Option<&RepairPlan>> {
        let before = self.plan.as_ref().map(|(step, _)| *step);
        let step = match fec {
            Fec::Off => None,
            Fec::Fixed { .. } => Some(0),
            Fec::Auto if loss < if before.is_some() { PROTECT_DOWN_TO_LOSS } else { PROTECT_FROM_LOSS } => {
                None
            }
            Fec::Auto => {
                let step = (loss.min(0.5) / LOSS_STEP).ceil() as u32;
                // A change by one step is ignored.
                Some(before.filter(|before| before.abs_diff(step) <= 1).unwrap_or(step))
            }
        };
        if step == before {
            return None;
        }
        self.plan = step.map(|step| match fec {
            Fec::Fixed { data, repair } => (step, RepairPlan::fixed(data, repair)),
            _ => (step, RepairPlan::auto(f64::from(step) * LOSS_STEP)),
        });
        Some(self.plan.as_ref().map(|(_, plan)| plan))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repair_grows_with_the_loss() {
        assert_eq!(
            [0.005, 0.02, 0.05, 0.12].map(|loss| required_repair_packets(20, loss, MAX_RESIDUAL)),
            [1, 2, 4, 8]
        );
        assert!(residual(20, 6, 0.12) < 0.01);
        assert!((residual(1, 1, 0.5) - 0.25).abs() < 1e-9);
        assert!((residual(10, 0, 0.1) - 0.1).abs() < 1e-9, "without repair all that is lost");
    }

    #[test]
    fn a_full_path_carries_more_data_with_less_repair() {
        for loss in [0.03, 0.05, 0.08, 0.12] {
            let plan = RepairPlan::auto(loss);
            // A packet costs itself, its part of the repair, and its retransmissions.
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
    fn protection_follows_the_loss_without_flapping() {
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
    fn a_configured_share_is_used_whatever_the_loss() {
        let mut watch = LossMonitor::default();
        let plan = watch.update(Fec::Fixed { data: 10, repair: 3 }, 0.0).flatten().unwrap();
        for load in [Load::Light, Load::Full] {
            assert_eq!([1, 3, 4, 7, 10].map(|data| plan.repair_count(data, load)), [1, 1, 2, 3, 3]);
        }
        assert!((plan.max_share - 0.3).abs() < 1e-9);
        assert!(watch.update(Fec::Off, 0.0).unwrap().is_none());
    }
}
